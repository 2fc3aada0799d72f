"""A trained model as a folder to share, with weights, model card, record and ledger.

    model.safetensors  the weights
    README.md          the model card, with the YAML head that model hubs read
    record.json        the run's record, from which the model is built and every ε recomputed
    recipe.yaml        the run's configuration as a recipe
    ledger.jsonl       the run's releases; a federation's nodes keep theirs
    SHA256SUMS         digests of the other files, as `sha256sum -c` reads them

That of a loop of one's own holds `report.json` instead of record and recipe, and no architecture.

`export.py` writes both, `card.py` their cards; `loading.py` uses and `verification.py` checks them.
"""
