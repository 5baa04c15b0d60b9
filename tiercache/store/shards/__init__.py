"""Stores of several shards: one for each rank that trains it, and a manifest that commits them together."""
