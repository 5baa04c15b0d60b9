"""Kernels against slow obvious NumPy."""
