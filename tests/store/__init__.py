"""The store against a dict, on every engine."""
