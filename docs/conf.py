"""Sphinx: `make docs` builds docs/_build/html, warnings are errors."""

import re
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
suppress_warnings = ["ref.python"]  # two modules may have a type of one name: `Record`
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_use_ivar = True


# The pages are plain Markdown that a forge shows too. What only the site can show is added here.
CONTENTS = {
    "Use": "tutorial own_data library tuning results epsilon audit_own glossary",
    "Findings": "cost complex papers performance",
    "Scale": "cluster federated",
    "Internals": "architecture contributing threat-model reference api",
}
LANGUAGES = {".py": "python", ".yaml": "yaml", ".toml": "toml"}


def setup(app):
    app.connect("source-read", fill)
    app.connect("env-get-outdated", lambda app, env, added, changed, removed: reference.MADE)
    app.connect("autodoc-process-docstring", escape, priority=1)  # before napoleon


def fill(app, name, source):
    """Fill in what is made from the code, the contents, and the text of linked examples."""
    text = source[0].replace("](../CONTRIBUTING.md", "](contributing.md")
    if name == "contributing":
        text = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
        text = text.replace("](docs/", "](")
    text = reference.fill(text)
    if name == "index":
        for caption, pages in CONTENTS.items():
            lines = ["```{toctree}", f":caption: {caption}", ":hidden:", "", *pages.split(), "```"]
            text += "\n" + "\n".join(lines) + "\n"
    source[0] = re.sub(r"^\[`\S+`\]\((\S+)\)$", include, text, flags=re.MULTILINE)


def include(match):
    """Show the file of a line that is nothing but a link to it."""
    path = match[1]
    language = LANGUAGES[Path(path).suffix]
    return f"{match[0]}\n\n```{{literalinclude}} {path}\n:language: {language}\n```"


def escape(app, what, name, thing, options, lines):
    lines[:] = reference.escaped(lines)
