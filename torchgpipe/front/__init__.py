"""Any module in place, proved on its sample; `torchgpipe.pipelined` is the way in."""

__all__: list[str] = []
