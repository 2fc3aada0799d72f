"""`zdp-bench bench`: what private and complex training cost, measured here, beside what the papers measured there.

Only ratios within one run mean anything. The sides of a comparison take turns (`measure.py`), must agree in what they compute
before any is timed (`steps.py`), and use the same number of threads. Tables: `tables.py`.
"""
