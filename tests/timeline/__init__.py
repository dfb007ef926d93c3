"""Tests of `torchgpipe.timeline`: recording, and the views of a recording."""
