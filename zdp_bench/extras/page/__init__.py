"""`zdp-bench report`: all runs, tables and figures on one HTML page that works offline.

page.py      collects the runs, tables and figures
curves.py    the learning curves
templates/   the page's text and scripts
bundled/     the libraries for its table and charts
"""
