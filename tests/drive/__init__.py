"""Tests of `torchgpipe.drive`."""
