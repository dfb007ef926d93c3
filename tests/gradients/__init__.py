"""Tests of `torchgpipe.gradients`."""
