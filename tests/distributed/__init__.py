"""Tests of `torchgpipe.distributed`: each runs several processes on this machine."""
