"""Training on several ranks: communication between them over torch.distributed."""
