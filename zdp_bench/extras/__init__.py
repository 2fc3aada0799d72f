"""Optional extras. Each folder can be deleted, and everything that does not name it still works.

Each folder has a README. Its `plugins.py` lists its commands and plug-ins for
`zdp_bench/registry.py`. The core imports an extra only when its commands or functions are called,
and no extra imports another.
"""
