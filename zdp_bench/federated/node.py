"""One node of a federation: its patients, its noise, its ledger. The steps are the engine's, as in a central run."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from zdp_bench import records
from zdp_bench.algorithms import Algorithm, Problem
from zdp_bench.config.digests import experiment_digest
from zdp_bench.config.schema import Run
from zdp_bench.data import Source, Splits
from zdp_bench.errors import UserError
from zdp_bench.federated.messages import digest
from zdp_bench.federated.partition import Part, dealt, steps_of
from zdp_bench.gradients.clipping import trainable
from zdp_bench.privacy.accounting import affordable_steps
from zdp_bench.privacy.ledger import Ledger, Position
from zdp_bench.privacy.noise import NoiseSource, SecureNoise, SeededNoise, run_key
from zdp_bench.registry import lookup
from zdp_bench.tasks import Task
from zdp_bench.training.devices import arithmetic, pick_device
from zdp_bench.training.environment import foreign_code, made_with
from zdp_bench.training.run import open_ledger
from zdp_bench.training.setup import (
    Plan,
    build_algorithm,
    build_model,
    check_fit,
    check_model,
    micro_batch_size,
    micro_batches,
    seed_layers,
)
from zdp_bench.training.step import Training, private_step


class Collecting(torch.optim.SGD):
    """SGD between a node's steps of one round. Keeps the sum of the released gradients: what the node sends.

    That is (θ − θ')/lr of the round, without the rounding that θ' would bring.
    """

    def __init__(self, parameters: Mapping[str, Tensor], lr: float) -> None:
        super().__init__(parameters.values(), lr=lr)
        self._named = parameters
        self.sums: dict[str, Tensor] = {}

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for name, parameter in self._named.items():
            assert parameter.grad is not None
            self.sums[name] = (
                self.sums[name] + parameter.grad if name in self.sums else parameter.grad
            )
        super().step(closure)


class Site:
    """What a process needs to be one or more nodes: data, task and model, each made when first asked for, and once."""

    def __init__(
        self, config: Run, data: Splits | None = None, device: torch.device | None = None
    ) -> None:
        self.config = config
        self.device = device or pick_device(config.device)
        self.nodes: dict[int, Node] = {}
        self._data = data
        self._checked = False

    @cached_property
    def data(self) -> Splits:
        config = self.config
        return self._data or lookup("dataset", config.dataset.name)(
            config.data_root, **config.dataset.options
        )

    @cached_property
    def task(self) -> Task:
        task: Task = lookup("task", self.config.task.name)(**self.config.task.options)
        return task

    @cached_property
    def model(self) -> torch.nn.Module:
        model = build_model(self.config, self.data)
        check_fit(self.config, model, self.task, self.data)
        return model.to(self.device)

    @cached_property
    def parts(self) -> list[Part]:
        assert self.config.federated.nodes is not None
        return dealt(self.data, self.config.federated.nodes, self.config.seed)

    def check(self, algorithm: Algorithm, plan: Plan) -> None:
        """`experiment.check_model`, once: the nodes here have one model, about the same batches, and algorithms that
        differ in their noise alone.

        Raises:
            UserError: the model must not be trained privately as it is.
        """
        if not self._checked:
            check_model(self.model, algorithm, self.task, self.data, self.config, plan)
            self._checked = True

    def node(self, number: int) -> Node:
        """The node of that number, always the same."""
        if number not in self.nodes:
            self.nodes[number] = Node(self, number)
        return self.nodes[number]

    def close(self) -> None:
        for node in self.nodes.values():
            if node.ledger:
                node.ledger.close()


class Node:
    """One node. It is asked to `join`, then to `prepare`, then for a `release` a round.

    Formal guarantees:
        - what a release is computed from, and its noise, is a function of (run, node, its data, step, weights): on the same
          weights it is the same release, bit for bit, and on others it has another sample and other noise;
        - its steps stand in this node's own ledger before they exist, so a release that never arrives is counted as well.
    """

    def __init__(self, site: Site, number: int) -> None:
        self.site, self.number = site, number
        split = site.config.federated.patients == "split"
        self.records: Source = site.parts[number] if split else site.data.train
        self.config = site.config
        self.ledger: Ledger | None = None

    def join(self) -> dict[str, Any]:
        """What the server must know to plan the rounds; nothing else of the data leaves the node.

        A digest of a site's own data would tell a server that knows all of it but one record what that one is. Where one data
        set is split over the nodes, the server has it anyway, and must see that all have the same.
        """
        told = {
            "node": self.number,
            "experiment": experiment_digest(self.site.config),
            "seed": self.site.config.seed,
            "records": len(self.records),
            "records_per_patient": self.site.data.examples_per_patient,
        }
        return told | (
            {"data": self.site.data.digest} if self.config.federated.patients == "split" else {}
        )

    def prepare(self, run: str, rounds: int, at_least: Position | None) -> dict[str, Any]:
        """Make the mechanism and open the ledger.

        Args:
            run: the digest that names the run's folder.
            at_least: how far this node's ledger had come when the server last saw it.

        Raises:
            UserError: no noise multiplier reaches the ε, the model must not be trained privately, or the ledger is not to be
                trusted.
        """
        site = self.site
        self.plan = steps_of(site.config, len(self.records), rounds)
        like = site.data.train.batch(torch.arange(0))[0]
        problem = Problem(site.model, site.task.loss, self.plan.sampling, site.config.seed, like)
        self.config, self.algorithm = build_algorithm(site.config, problem, self.plan)
        site.check(self.algorithm, self.plan)
        self.mechanism = self.algorithm.mechanism()
        self.size = micro_batch_size(
            self.config, self.plan, site.model, site.task, site.data, site.device
        )
        name = f"{self.number:02d}" + (
            f"-{site.data.digest[:8]}" if site.config.federated.patients == "own" else ""
        )
        own = f"node {self.number}:{site.data.digest}"  # the data's digest only in here: it leaves no node
        code = f"{foreign_code(site.config.plugins)}:{own}"
        self._key = run_key(run, self.mechanism, code)
        self._path = (
            records.folder(site.config.results, site.config.recipe, run)
            / "nodes"
            / name
            / "ledger.jsonl"
        )
        self._open(at_least)
        return self.standing() | {"mechanism": self.mechanism.digest()}

    def _open(self, at_least: Position | None = None) -> None:
        if self.ledger:
            self.ledger.close()
        repeatable = not self.config.privacy.secure
        made = made_with(
            self.config.plugins,
            self.site.device,
            self.size.records,
            1,
            self.config.execution.deterministic,
        )
        start = made, 0, "the weights it is sent"  # and nothing else: each step's line says which
        self.ledger = open_ledger(
            self._path, self.mechanism, repeatable, at_least, start, whose=f"node {self.number}"
        )
        privacy, before = self.config.privacy, self.plan.before
        still = (
            before + self.ledger.releases + self.plan.steps
        )  # the most that can have been released at the end
        budget = privacy.max_epsilon
        self.limit = (
            max(0, affordable_steps(self.mechanism, privacy.delta, budget, still) - before)
            if budget
            else None
        )
        self._size = self._path.stat().st_size

    def standing(self) -> dict[str, Any]:
        """How far the ledger has come."""
        assert self.ledger is not None
        return {"entries": self.ledger.position.entries, "digest": self.ledger.position.digest}

    def release(
        self, round_: int, weights: Mapping[str, Tensor]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """One round: `federated.local_steps` private steps from these weights, and the sum of the gradients they released.

        Raises:
            BudgetExceeded: a step would pass `privacy.max_epsilon`; it was not taken.
            UserError: this process was not asked to `prepare`; the server asks it to join again.
        """
        if not hasattr(self, "plan"):
            raise UserError("it was started anew, and joins again")
        site, config, count = self.site, self.config, self.config.federated.local_steps
        if (
            self.ledger is None or self._path.stat().st_size != self._size
        ):  # another process was this node in between (Ray)
            self._open()
        assert self.ledger is not None
        parameters, of = trainable(site.model), digest(weights)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])
        key = f"{self._key}:{self.ledger.generation}:{of}"
        noise: NoiseSource = SecureNoise() if config.privacy.secure else SeededNoise(key)
        optimizer = Collecting(parameters, config.federated.local_lr)
        training = Training(self.algorithm, site.model, optimizer, noise, self.ledger, self.limit)
        data = site.data
        with arithmetic(
            config.precision,
            config.execution.deterministic,
            site.model,
            self.algorithm,
            site.device,
        ):
            for step in range(round_ * count, (round_ + 1) * count):
                indices, divisor = self.plan.draw(key, step, config.privacy.secure)
                seed_layers(key, step, 0, config.privacy.secure)
                batches = micro_batches(
                    self.records,
                    indices,
                    config,
                    site.device,
                    key,
                    step,
                    data.augment,
                    data.augment_targets,
                    self.size,
                )
                private_step(training, step, batches, divisor, of)
        self._size = self._path.stat().st_size
        return self.standing() | {"round": round_}, optimizer.sums
