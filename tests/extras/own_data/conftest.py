"""A cache for each test."""

from tests.data.conftest import _own_cache  # noqa: F401
