"""Data sets that are generated, for tests, demonstrations and runs without the real files."""
