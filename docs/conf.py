"""How Sphinx builds the site; `make docs`."""

import re
import sys
from pathlib import Path

import gcjax

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "gcjax"
author = "the gcjax authors"
copyright = author
version = release = gcjax.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "bits",
    "docstrings",
    "mathml",
]
exclude_patterns = ["_build", "_ext"]
templates_path = ["_templates"]
suppress_warnings = ["myst.xref_ambiguous"]

# Pages
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# Tutorials: run once, and again when their text changes.
nb_execution_mode = "cache"
nb_execution_cache_path = str(Path(__file__).parent / "_build" / "notebooks")
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

# The reference
autosummary_generate = True
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "undoc-members": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Look
html_theme = "furo"
html_title = "gcjax"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_theme_options = {"navigation_with_keys": True, "top_of_page_buttons": []}

linkcheck_timeout = 20
linkcheck_retries = 2
linkcheck_anchors = False


def setup(app):
    """Pages link to text files of other folders as GitHub does; on the site these links are downloads."""
    files = re.compile(r"\]\((?=(?:\.\./)+(?:CONTRIBUTING|bench/|examples/)[^)#]*\.md)([^)#]*)[^)]*\)")
    app.connect("source-read", lambda app, page, text: text.__setitem__(0, files.sub(r"](path:\1)", text[0])))
