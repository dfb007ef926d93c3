"""Tests of `torchgpipe.cell`."""
