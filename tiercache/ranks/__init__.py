"""Several devices: one process for each, rows and passes divided among them, exchanged by torch.distributed."""
