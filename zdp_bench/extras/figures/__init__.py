"""Draw figures of papers, of our tables and of your runs from records and tables.

figures.py           selects the data of each figure
drawing.py           the style, and panels of curves
reconstructions.py   the reconstructed images of MRI runs
"""
