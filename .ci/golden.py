"""Write what a change of layout must not change, as text to compare: `.ci/golden.py > FILE`.

The experiment digest of every job of every recipe, the checksum of every table made of the
committed records, the help of every command, and the exit code of configurations that are refused.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import sys
import tempfile
from pathlib import Path

from hydra.errors import HydraException

from zdp_bench import assets
from zdp_bench.cli.commands import COMMANDS
from zdp_bench.cli.parser import build_parser
from zdp_bench.config import check, configured
from zdp_bench.config.digests import experiment_digest
from zdp_bench.errors import UserError
from zdp_bench.experiments import claims
from zdp_bench.report import papers

ROOT = Path(__file__).resolve().parent.parent
REFUSED = """
algorithm.noise_multiplier=-1 | algorithm.noise_multiplier=x | algorithm.max_grad_norm=0
algorithm=dp_sdg | model=complex_mpl | model.hidden=3 | model.hiden=[3] | dataset=mnits
dataset.foo=1 | task=nothing | trainer.epochs=0 | trainer.epochs=1.5 | trainer.batch_size=0
trainer.sample_rate=2 | trainer.epoch=1 | privacy.delta=2 | privacy.delta=0 | privacy.unit=person
privacy.secur=true | privacy.target_epsilon=-1 | optimizer=sdg | optimizer.lr=-1 | optimizer.lr=abc
optimizer.momentum=x | scheduler=none scheduler.step_size=3 | device=tpu | threads=0 | seed=-1
seed=x | execution.prefetch=x | execution.precision=int8 | accountant=rpd | federated.nodes=0
federated.nodes=2 federated.rounds=x | +foo=1 | foo=1 | paths.data= | recipe=quickstrat
recipe=none.yaml | privacy.unit=patient dataset=mnist | claims.table=x
""".replace("\n", " | ").split(" | ")


def main() -> None:
    for recipe in sorted(assets.group(assets.RECIPES)):
        try:
            words = claims.jobs_of(recipe)
        except HydraException:  # it sweeps over whatever is registered
            words = [()]
        jobs = [claims.compose_job(recipe, job) for job in words]
        digests = [experiment_digest(check(config)) for config in jobs]
        print("recipe", recipe, len(jobs), _checksum("\n".join(digests)))
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results"
        shutil.copytree(ROOT / "results", results)
        for name in [*filter(papers.recipes_of, papers.available()), *papers.ours()]:
            for path in claims.build_table(name, results).write(papers.file_of(name, results)):
                print("table", path.name, _checksum(path.read_text(encoding="utf-8")))
    parser = build_parser()
    print("help", "all", _checksum(parser.format_help()))
    for verb in sorted(COMMANDS):
        with contextlib.redirect_stdout(io.StringIO()) as text, contextlib.suppress(SystemExit):
            parser.parse_args([verb, "--help"])
        print("help", verb, _checksum(text.getvalue()))
    for words in filter(None, (line.strip() for line in REFUSED)):
        overrides = words.split() if "recipe=" in words else ["recipe=quickstart", *words.split()]
        try:
            configured(overrides)
            print("accepted", words)
        except UserError:
            print("refused", words)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
