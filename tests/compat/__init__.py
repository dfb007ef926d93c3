"""Tests of `torchgpipe.compat`."""
