"""Your own pictures, scans and recordings as a data set: `dataset=folder`.

folder.py    the data set and its options
listing.py   which files there are, which of them are examples, and on which side of the split
readers.py   what kind of file each is, what it becomes, and what reads it
"""
