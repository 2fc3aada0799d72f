"""Figures of papers, of our tables and of your runs, drawn from records and tables.

`drawing.py` has the style and draws panels of curves, `figures.py` what stands in them,
`reconstructions.py` the images of MRI runs.
"""
