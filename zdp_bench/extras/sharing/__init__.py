"""Export a trained model to a folder that can be shared.

    model.safetensors  the weights
    README.md          the model card, with a YAML head for model hubs
    record.json        the run's record: the model is built, and every ε recomputed, from it
    recipe.yaml        the run's configuration as a recipe
    ledger.jsonl       the run's releases, except for a federation, whose nodes keep their ledgers
    SHA256SUMS         digests of the other files, in the format of `sha256sum -c`

The export of your own training loop has `report.json` instead of record and recipe. It does not
contain the architecture.

    folder.py        the files: their names, and how they are read and written
    export.py        writes an export
    card.py          the model card
    loading.py       builds the model of an export, and runs it
    verification.py  checks an export
"""
