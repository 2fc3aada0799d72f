"""Sphinx: `make docs` builds docs/_build/html, warnings are errors."""

project = "zdp-bench"
author = "the zdp-bench developers"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3
html_theme = "furo"
html_title = "zdp-bench"
nitpicky = True
