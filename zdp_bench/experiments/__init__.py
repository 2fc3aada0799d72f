"""Many runs: sweeps, the reproduction of tables, validation, and predictions of time."""
