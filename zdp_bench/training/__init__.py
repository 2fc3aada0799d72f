"""One run: set-up, private steps, evaluation, checkpoints, devices, interrupts and progress."""
