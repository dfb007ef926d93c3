"""Campaigns: what is tried very often, or takes an environment of its own. They say whether the library is right.

Nothing here measures speed or memory; `benchmarks/README.md` lists what does.
"""
