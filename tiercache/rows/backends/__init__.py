"""Backends: they store, move, look up and step rows on one kind of device, a CPU or a CUDA GPU."""
