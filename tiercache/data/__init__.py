"""Extraction, and the datasets that training reads: sub-datasets and their key sets."""
