"""Pipelining any module, with frames in place of a trace; `torchgpipe.pipelined` is the way in."""

__all__: list[str] = []
