"""Tests of `torchgpipe.gpipe`."""
