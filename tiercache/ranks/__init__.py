"""Several ranks: who owns which rows, what travels between them, and the parts of one sharded store."""
