"""`zdp-bench search`: Optuna proposes hyper-parameters, and each trial is an ordinary run.

space.py     reads the search from command-line words: which keys to vary, over which values
search.py    runs the trials within one ε, and reports the best trial and the total ε
"""
