"""Tests of `torchgpipe_balancing` and `torchgpipe.balance`."""
