"""Describe the package for an index such as PyPI, where relative links and pictures of the README lead nowhere.

Links to pages of the documentation lead to the published site, if the environment variable SITE has its address, with a
slash at its end; REPOSITORY has that of the repository. The workflows set both, so no address is written down that may
be another's.

All else stands in pyproject.toml.
"""

import os
import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent


def description(base: str) -> str:
    """Return the README with the links of an index: to pages of the site, or else only their text."""
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    if base:
        readme = re.sub(r"\]\(docs/([^)]+)\.(?:rst|ipynb)\)", rf"]({base}\1.html)", readme)
    pictures = re.sub(r"!\[([^][]+)\]\((?!https?:)(.+?)\)", r"*Picture: \1 (`\2` of the source distribution).*", readme)
    return re.sub(r"\[([^][]+)\]\((?!https?:)(.+?)\)", r"\1", pictures)


def urls(site: str, repository: str) -> dict[str, str]:
    """Return the links that an index shows beside the description."""
    pages = {"Documentation": site} if site else {}
    if repository:
        pages |= {"Repository": repository, "Issues": f"{repository}/issues"}
        pages["Changelog"] = f"{site}project/changelog.html" if site else f"{repository}/blob/main/CHANGELOG.md"
    return pages


if __name__ == "__main__":
    site = os.environ.get("SITE", "")
    setup(
        long_description=description(site),
        long_description_content_type="text/markdown",
        project_urls=urls(site, os.environ.get("REPOSITORY", "")),
    )
