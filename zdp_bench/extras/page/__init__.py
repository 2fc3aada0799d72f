"""`zdp-bench report`: everything on one HTML page that needs no network.

`page.py` puts the runs, tables and figures together. `templates/` has the page's own text and code,
`bundled/` the libraries of its table and its chart.
"""
