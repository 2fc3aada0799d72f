"""What is built of many runs: sweeps, tables reproduced, validation, costs, learning-rate search."""
