"""Processors: what touches arrays where rows are trained, a CPU or a CUDA GPU, behind one set of verbs."""
