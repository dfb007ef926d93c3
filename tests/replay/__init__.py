"""Tests of `torchgpipe.replay`."""
