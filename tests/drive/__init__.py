"""Tests of `torchgpipe.engine`: cells, recomputation, gradients, dependencies, copies, workers."""
