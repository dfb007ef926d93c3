"""Tests of `torchgpipe.norms`."""
