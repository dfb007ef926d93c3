"""What the library costs and what it gains: each module that can be run answers one question.

They are run from the root of the checkout, as `python -m benchmarks.NAME`; README.md tells which there are.
"""
