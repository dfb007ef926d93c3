"""For tools that still ask for it; all there is to know stands in pyproject.toml."""

from setuptools import setup

setup()
