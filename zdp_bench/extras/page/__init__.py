"""`zdp-bench report`: everything on one HTML page that needs no network.

`run_data` puts the runs together, `scripts` what the page carries with it, `page` writes it;
`templates/` has its own text and code, `bundled/` the libraries of its table and charts.
"""
