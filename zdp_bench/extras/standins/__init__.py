"""Generated data sets in the layouts of public releases, for tests and runs without downloads."""
