"""What extraction leaves and training reads: datasets, their key sets and sub-datasets."""
