"""Mirrors `torchgpipe/timeline`: recording, and the ways to look at what was recorded."""
