"""Complex layers, activations and norms with the interfaces of torch's own."""
