"""`zdp-bench report`: everything on one HTML page that needs no network.

`run_data` puts the runs together, and `page` writes them with all that the page carries with it.
`templates/` has its own text and code, `bundled/` the libraries of its table and charts.
"""
