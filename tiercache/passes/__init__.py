"""What extraction leaves and training reads: pass sets, their key sets and sub-datasets."""
