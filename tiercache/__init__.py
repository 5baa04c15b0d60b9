"""tiercache: embedding tables larger than memory, trained in PyTorch from an SSD parameter store."""
