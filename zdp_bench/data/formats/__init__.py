"""Readers of file formats: IDX, NIfTI, k-space HDF5, folders of labelled volumes."""
