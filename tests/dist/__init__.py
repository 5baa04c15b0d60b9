"""Several ranks: how they talk, what they own, and that they train as one process does."""
