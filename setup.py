"""Describe the package for an index such as PyPI, where relative links and pictures of the README lead nowhere.

Links to pages of the documentation lead to the published site, if docs/conf.py has its address.

All else stands in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def site() -> str:
    """Return the address of the published site, or '' if there is none."""
    conf = HERE / "docs" / "conf.py"
    found = (
        re.search(r'^html_baseurl = "(.*)"', conf.read_text(encoding="utf-8"), re.MULTILINE) if conf.exists() else None
    )
    return found[1] if found else ""


def description(base: str) -> str:
    """Return the README with the links of an index: to pages of the site, or else only their text."""
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    if base:
        readme = re.sub(r"\]\(docs/([^)]+)\.(?:rst|ipynb)\)", rf"]({base}\1.html)", readme)
    pictures = re.sub(r"!\[([^][]+)\]\((?!https?:)(.+?)\)", r"*Picture: \1 (`\2` of the source distribution).*", readme)
    return re.sub(r"\[([^][]+)\]\((?!https?:)(.+?)\)", r"\1", pictures)


if __name__ == "__main__":
    setup(long_description=description(site()), long_description_content_type="text/markdown")
