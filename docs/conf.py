"""How Sphinx builds the documentation: `make docs`, with warnings as errors."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torchgpipe

project = "torchgpipe"
author = "The torchgpipe authors"
copyright = "2026, the torchgpipe authors"
release = torchgpipe.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"torchgpipe {release}"
