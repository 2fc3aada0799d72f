"""A callback that writes each evaluation to TensorBoard."""

from torch.utils.tensorboard import SummaryWriter

from zdp_bench.config.digests import experiment_digest
from zdp_bench.registry import register


@register("callback", "tensorboard")
def tensorboard(run):
    job = f"{run.recipe}-{experiment_digest(run)[:8]}-{run.seed}"  # of a sweep, each its own
    board = SummaryWriter(run.results / "tensorboard" / job)

    def on_step(metrics):
        for name, value in metrics.items():
            board.add_scalar(name, value, metrics["step"])

    return on_step
