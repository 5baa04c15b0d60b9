"""Moving rows between store, host and device as planned."""
