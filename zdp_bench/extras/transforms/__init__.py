"""Public transforms of single examples, for `representation=NAME`."""
