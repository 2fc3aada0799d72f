"""The networks, one file each, registered by name for `model=NAME`."""
