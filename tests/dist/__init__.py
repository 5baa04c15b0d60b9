"""Several ranks: communication, ownership, and training that ends as on one process."""
