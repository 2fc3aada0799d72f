"""YAML files that ship with zdp-bench."""

from __future__ import annotations

from zdp_bench import assets


def test_what_a_caller_changes_nobody_else_sees() -> None:
    path = assets.CONF / "config.yaml"
    assets.read_yaml(path)["defaults"].append({"trainer": "another"})
    assert {"trainer": "another"} not in assets.read_yaml(path)["defaults"]
