"""Optional extras: each folder here can be deleted, and what does not name it works as before.

A folder's README says what it is; its `plugins.py` names what it adds, for `zdp_bench/registry.py`.
The core imports it only when its commands or functions are called, and no extra imports another.
"""
