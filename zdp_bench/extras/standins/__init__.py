"""Data sets that are generated in a release's layout: for runs without its files, and for tests."""
