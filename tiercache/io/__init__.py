"""Exchange: rows of a store to and from the formats of others."""
