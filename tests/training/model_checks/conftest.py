"""`make`: `make_private` with defaults."""

from __future__ import annotations

from tests.library.conftest import make  # noqa: F401 - a fixture
