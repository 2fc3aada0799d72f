"""`zdp-bench search`: Optuna proposes hyper-parameters, and each trial is an ordinary run.

`space` reads what is asked and what to vary, `trials` keeps the trials, makes them runs within one
ε and scores them, `search` carries the whole out and says what it found and spent.
"""
