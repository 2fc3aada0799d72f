"""`zdp-bench search`: Optuna proposes hyper-parameters, and each trial is an ordinary run.

space.py     reads the search from command-line words: which keys to vary, over which values
search.py    draws the trials, and runs each of them
noise.py     decides what a trial may spend, so that all together stay within one ε
journal.py   writes search.json, which lists the trials, the best one and the total ε
report.py    shows the trials as a table, with notes and commands
"""
