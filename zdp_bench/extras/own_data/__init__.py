"""Your own pictures, scans and recordings as a data set: `dataset=folder`.

folder.py    the data set and its options
listing.py   lists the files, chooses examples from them, and splits them
readers.py   the kinds of files, how each is read, and the shapes of their examples
arrays.py    reads signals from CSV and `.npy` files
"""
