"""Results that must not change: trainings whose rows, optimizer state and dense weights match committed digests."""
