"""Engines, which store the bytes of a store: LMDB with a file of blocks, Zarr arrays, and memory."""
