"""The only package that computes ε: mechanism, noise, sampling, accounting, ledger."""
