"""Tests of `torchgpipe.schedule`."""
