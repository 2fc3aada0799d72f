"""`zdp-bench search`: Optuna proposes hyper-parameters, and each trial is an ordinary run.

`space` reads what to vary, `plan` what is asked, `study` keeps the trials, `noise` keeps them
within one ε, `score` says how good one was, `search` carries the whole out, `outcome` says what it
found and spent, and `sheet` shows it. `api` is what the verb calls.
"""
