"""Tests of `torchgpipe.transport`."""
