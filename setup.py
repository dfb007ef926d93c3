"""Describe the package for an index such as PyPI, where relative links and pictures of the README lead nowhere.

All else stands in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup


def description() -> str:
    """Return the README with only the text of its relative links, and where its pictures are."""
    readme = (Path(__file__).parent / "README.md").read_text(encoding="utf-8")
    pictures = re.sub(r"!\[([^][]+)\]\((?!https?:)(.+?)\)", r"*Picture: \1 (`\2` of the source distribution).*", readme)
    return re.sub(r"\[([^][]+)\]\((?!https?:)(.+?)\)", r"\1", pictures)


if __name__ == "__main__":
    setup(long_description=description(), long_description_content_type="text/markdown")
