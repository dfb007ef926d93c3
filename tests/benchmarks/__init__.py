"""Tests of the benchmarks: each benchmark runs, at meaninglessly small sizes."""
