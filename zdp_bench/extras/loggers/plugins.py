"""What this extra adds, as `zdp_bench/registry.py` reads it."""

ADDS = {
    "logger": {
        "mlflow": "zdp_bench.extras.loggers.mlflow:Logger",
        "tensorboard": "zdp_bench.extras.loggers.tensorboard:Logger",
        "wandb": "zdp_bench.extras.loggers.wandb:Logger",
    }
}
