"""Ranks that train together: what they tell each other, over torch.distributed."""
