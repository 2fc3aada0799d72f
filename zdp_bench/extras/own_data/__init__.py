"""A person's own pictures, scans and recordings as a data set: `dataset=folder`.

folder.py      the data set and its options
own_files.py   which files there are: folders, or a CSV
own_listing.py which of them are examples, and on which side of the split
kinds.py       what kind of file it is, and who reads it
form.py        what an example looks like
pictures.py, volumes.py, dicom.py, recordings.py   the readers
"""
