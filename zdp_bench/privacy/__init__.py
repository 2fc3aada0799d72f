"""The only rooms that speak of ε: mechanism, noise, accounting, ledger. They import nothing else of ours."""
