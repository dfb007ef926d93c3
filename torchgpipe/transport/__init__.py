"""From device to device: routes of streams, and portals of skips."""

__all__: list[str] = []
