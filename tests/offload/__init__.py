"""Tests of `torchgpipe.offload`."""
