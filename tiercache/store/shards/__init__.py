"""Stores of several ranks: the sharding, the folder and the writer of each rank, and rows joined for readers."""
