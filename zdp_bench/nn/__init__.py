"""Complex layers, activations and norms. Outside they look like torch's own; inside they are written to be fast and exact."""
