"""The spine of any module: found on a sample, divided into partitions, on their devices.

Words of this room, beside those of the field:

    spine      the modules of the model that are called one after the other, and are balanced like layers
    door       what stands in front of a module of the spine, and is called in its place
    part       a module of the spine, or several that cannot be kept apart
    partition  neighbouring parts: what is balanced, and what layouts and errors tell of
"""

__all__: list[str] = []
