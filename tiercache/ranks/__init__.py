"""More than one device: one process each, rows exchanged between them, a part of the store for each."""
