"""A callback that writes each evaluation to TensorBoard."""

from torch.utils.tensorboard import SummaryWriter

from zdp_bench.registry import register


@register("callback", "tensorboard")
def tensorboard(run):
    board = SummaryWriter(run.results / "tensorboard" / f"{run.recipe}-{run.seed}")

    def on_step(metrics):
        for name, value in metrics.items():
            board.add_scalar(name, value, metrics["step"])

    return on_step
