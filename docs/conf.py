"""Sphinx: `make docs` builds docs/_build/html, warnings are errors."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import reference  # noqa: E402

project = "zdp-bench"
author = "the zdp-bench developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
smartquotes = False  # it turns --cfg into a dash
html_theme = "furo"
html_title = "zdp-bench"
html_show_copyright = False
nitpicky = True
nitpick_ignore_regex = [("py:.*", ".*")]  # types of other packages have no pages here
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True


def setup(app):
    app.connect("source-read", fill)
    app.connect("env-get-outdated", lambda app, env, added, changed, removed: reference.MADE)
    app.connect("autodoc-process-docstring", escape, priority=1)  # before napoleon


def fill(app, name, source):
    source[0] = reference.fill(source[0])


def escape(app, what, name, thing, options, lines):
    lines[:] = reference.escaped(lines)
