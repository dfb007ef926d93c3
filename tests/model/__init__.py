"""Tests of `torchgpipe.model`."""
