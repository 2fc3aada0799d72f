"""The commands of this extra, one module each."""
