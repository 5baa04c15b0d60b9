"""Offline: from files of samples to passes."""
