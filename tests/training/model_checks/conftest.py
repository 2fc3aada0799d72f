"""`make`: `make_private` with defaults."""

from tests.library.conftest import make  # noqa: F401 - a fixture
