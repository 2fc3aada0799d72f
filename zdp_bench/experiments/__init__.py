"""Commands built on many runs: sweeps, reproduce, validate, cost."""
