"""Tests of the benchmarks: each runs, at sizes that mean nothing."""
