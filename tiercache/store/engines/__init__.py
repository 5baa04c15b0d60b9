"""Engines: they keep the bytes of a store. LMDB with a file of blocks, Zarr arrays, and memory."""
