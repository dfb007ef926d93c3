"""Tests of `torchgpipe.skip` and of the way of skips through the pipeline."""
