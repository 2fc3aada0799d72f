"""The plug-ins of this extra, for `zdp_bench/registry.py`."""

ADDS = {
    "logger": {
        "mlflow": "zdp_bench.extras.loggers.mlflow_logger:MlflowLogger",
        "tensorboard": "zdp_bench.extras.loggers.tensorboard_logger:TensorboardLogger",
        "wandb": "zdp_bench.extras.loggers.wandb_logger:WandbLogger",
    }
}
