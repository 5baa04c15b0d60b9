"""Import and export: rows of a store to and from the formats of other programs."""
