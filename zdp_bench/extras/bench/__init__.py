"""`zdp-bench bench`: measure the cost of private and complex training, next to the papers' numbers.

Only ratios within one run are meaningful. The sides of a comparison (`steps.py`) must compute the
same result before any is timed. They are timed in turn (`measure.py`), with the same number of
threads. `tables.py` lists the comparisons, and writes the tables.
"""
