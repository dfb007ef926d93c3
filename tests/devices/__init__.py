"""Tests of `torchgpipe.devices`."""
