"""Configure Sphinx for `make docs`, with warnings as errors and without a network."""

import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import torchgpipe  # noqa: E402

project = "torchgpipe"
author = "The torchgpipe authors"
copyright = "2026, the torchgpipe authors"
release = torchgpipe.__version__

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.doctest",  # only for testsetup; tests/test_docs.py runs the code
    "sphinx_copybutton",
    "myst_nb",
    "house",
]
nb_execution_mode = "off"  # the outputs are in the notebooks
exclude_patterns = ["_build", "**.ipynb_checkpoints"]

autodoc_member_order = "bysource"
autodoc_mock_imports = ["transformers"]  # which only users of its Trainer have
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_type_aliases = {"M": "torch.nn.Module"}  # a type variable says nothing to a reader
napoleon_use_ivar = True
# Copy only the input of a session. Prompts mark it: parts of a traceback have the classes of code.
copybutton_selector = "div:not(.output) > div.highlight pre"  # not what a notebook prints
copybutton_exclude = ".linenos"
copybutton_prompt_text = r">>> |\.\.\. ?|\$ "
copybutton_prompt_is_regexp = True
copybutton_copy_empty_lines = False

# Links to the pages of PyTorch and Python, read from local files instead of the network.
intersphinx_mapping = {
    "torch": ("https://docs.pytorch.org/docs/stable/", "inventories/torch.txt"),
    "python": ("https://docs.python.org/3/", "inventories/python.txt"),
}

html_theme = "furo"
# The published site, with a slash at its end, from the workflow: pages of all versions name those of the latest.
html_baseurl = os.environ.get("SITE", "")
if html_baseurl:
    extensions.append("sphinx_sitemap")
    sitemap_url_scheme = "{link}"
pygments_dark_style = "a11y-dark"  # the sister of the light style; Furo's own underlines the names of modules
html_title = f"torchgpipe {release}"
html_static_path = ["_static"]
html_css_files = ["house.css"]
html_js_files = ["house.js"]
html_favicon = "_static/logo.svg"
html_copy_source = False
html_theme_options = {
    "light_logo": "logo.svg",
    "dark_logo": "logo.svg",
    "light_css_variables": {"color-brand-primary": "#00795a", "color-brand-content": "#00795a"},
    "dark_css_variables": {"color-brand-primary": "#3fc59b", "color-brand-content": "#3fc59b"},
}
