"""Tests of `torchgpipe_balancing.planning`."""
