"""The verbs of this extra, one module each."""
