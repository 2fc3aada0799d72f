"""Experiment trackers by name: `logger=wandb`, `logger=mlflow`, `logger=tensorboard`."""
