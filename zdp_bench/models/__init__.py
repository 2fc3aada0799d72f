"""The zoo: one architecture a file. A builder gets (input shape, number of outputs) and its options by keyword."""
