"""Public transforms of one example, for `representation=NAME`."""
