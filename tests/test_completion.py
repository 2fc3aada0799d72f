"""Shell completion: what may follow, and each shell's own script where the shell is there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from zdp_bench.cli.commands import COMMANDS
from zdp_bench.cli.completion import SCRIPTS, complete
from zdp_bench.config.plugins import every_key


def test_verbs_options_recipes_groups_and_keys_are_completed() -> None:
    assert set(complete([""])) == {*COMMANDS, "--help", "--version", "--completion"}
    assert complete(["re"]) == ["report", "reproduce", "results"]
    assert complete(["run", "recipe=quick"]) == ["recipe=quickstart"]
    assert "model=complex_mlp" in complete(["run", "-m", "model="])
    assert "dataset=mnist" in complete(["validate", "dataset=mn"])
    assert complete(["run", "recipe=mnist", "optimizer.l"]) == ["optimizer.lr="]
    assert complete(["run", "privacy.total"]) == ["privacy.total_budget="]
    assert complete(["results", "--format", "h"]) == ["html"]
    assert "--show-config" in complete(["run", "--s"])
    assert complete(["table", "zeta_dp_2021/1"]) == ["zeta_dp_2021/1"]
    assert complete(["list", "rec"]) == ["recipes"]
    assert complete(["--completion", ""]) == sorted(SCRIPTS)
    assert complete(["run", "nothing=x"]) == complete(["rnu", ""]) == []


def test_every_key_that_a_yaml_file_names_is_completed() -> None:
    found = set(complete(["run", ""]))
    keys = [key for key, _ in every_key() if not key.startswith(("launcher", "hydra"))]
    unnamed = [key for key in keys if f"{key}=" not in found]
    # the options of torch's optimisers and schedulers that our YAML leaves to torch
    assert not [key for key in unnamed if not key.startswith(("optimizer.", "scheduler."))], unnamed


@pytest.fixture
def command(tmp_path: Path) -> dict[str, str]:
    """The environment of a shell that finds `zdp-bench`."""
    script = tmp_path / "zdp-bench"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m zdp_bench "$@"\n')
    script.chmod(0o755)
    return {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_bash_completes_behind_an_equals_sign(command: dict[str, str]) -> None:
    def replies(line: str) -> list[str]:
        asked = (
            f'eval "$(zdp-bench --completion bash)"; COMP_LINE="{line}" COMP_POINT={len(line)}; '
        )
        asked += "compopt() { :; }; _zdp_bench; printf '%s\\n' \"${COMPREPLY[@]}\""
        done = subprocess.run(
            ["bash", "-c", asked], env=command, capture_output=True, text=True, check=True
        )
        return done.stdout.split()

    assert replies("zdp-bench run recipe=quick") == ["quickstart"]
    assert replies("zdp-bench run recipe=mnist optimizer.l") == ["optimizer.lr="]
    assert replies("zdp-bench cov") == ["coverage"]


@pytest.mark.parametrize("shell", sorted(SCRIPTS))
def test_each_script_is_one_that_its_shell_can_read(shell: str, command: dict[str, str]) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n"], input=SCRIPTS[shell], env=command, text=True, check=True)
