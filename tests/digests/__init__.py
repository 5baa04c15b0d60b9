"""What must not change: trainings whose rows, optimizer state and dense weights are held to committed digests."""
