"""Data sets generated, or made of other real data: for runs without the released files, for tests.

`*_synthetic`, `kspace_phantom` and `synthetic_images` are generated; `*_from_volumes` and
`public_kspace` are made of volumes and pictures that anybody may have. The writers write the files
of a release, which the core's readers read.
"""
