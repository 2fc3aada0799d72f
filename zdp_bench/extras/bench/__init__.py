"""`zdp-bench bench`: what private and complex training cost, measured here, beside what the papers
measured there.

Only ratios within one run mean anything. The sides of a comparison (`steps.py`) must agree in what
they compute before any is timed, take turns (`measure.py`), and use the same number of threads.
`tables.py` lists what is compared, and writes it down.
"""
