"""Experiment trackers that a run may tell its numbers: TensorBoard, MLflow, Weights & Biases."""
