"""Scripts, styles and data inside the page: escaped, and named by hash in its security policy.

The browser runs the scripts whose SHA-256 the page's Content-Security-Policy lists, and no other,
whatever a record or a drawing holds.
"""

from __future__ import annotations

import json
import re
from base64 import b64encode
from hashlib import sha256
from importlib.resources import files
from typing import Any

from markupsafe import Markup

from zdp_bench.records import to_json

_REPORT = files("zdp_bench.extras.page")
SCRIPTS = (
    "bundled/tabulator.min.js",
    "bundled/chart.umd.min.js",
    "templates/charts.js",
    "templates/runs.js",
    "templates/dialog.js",
)
STYLES = ("bundled/tabulator_simple.min.css", "templates/page.css")
LICENCES = ("bundled/tabulator.LICENSE", "bundled/chart.LICENSE")


def scripts() -> list[Markup]:
    """Return the text of each script, ready for its element."""
    return [_script(name) for name in SCRIPTS]


def styles() -> list[Markup]:
    """Return the text of each style sheet, ready for its element."""
    return [Markup(_without_map(_read(name)).replace("</", "<\\/")) for name in STYLES]


def licences() -> list[str]:
    """Return the licences of the libraries, which go where their text goes."""
    return [_read(name) for name in LICENCES]


def policy() -> str:
    """Return the Content-Security-Policy: our scripts by their hashes, pictures, and no network."""
    hashes = [b64encode(sha256(text.encode()).digest()).decode() for text in scripts()]
    allowed = " ".join(f"'sha256-{digest}'" for digest in hashes)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "form-action 'none'; base-uri 'none'"
    )


def data(value: Any) -> Markup:
    """Return a value as JSON that no HTML parser reads as markup, and no script as an end of line.

    ∞ and NaN become the words "inf" and "nan".
    """
    text = json.dumps(to_json(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return Markup(text)


def _script(name: str) -> Markup:
    """Return a script in which no HTML parser sees its end or a comment."""
    return Markup(re.sub(r"<(/script|!--)", r"<\\\1", _without_map(_read(name)), flags=re.I))


def _without_map(text: str) -> str:
    return re.sub(r"(//|/\*)# sourceMappingURL=\S+( ?\*/)?", "", text).strip() + "\n"


def _read(name: str) -> str:
    return _REPORT.joinpath(name).read_text(encoding="utf-8")
