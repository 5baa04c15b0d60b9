"""What parts of a training give each other: frozen values, which import nothing else of ours but the kernels' views."""
