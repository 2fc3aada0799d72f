"""Optional extras: each folder here can be deleted, and everything else works as before.

A folder's README says what it is; its `plugins.py` names what it adds, for `zdp_bench/registry.py`.
The core imports nothing of it, and no extra imports another.
"""
