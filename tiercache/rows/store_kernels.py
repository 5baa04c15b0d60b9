"""Kernels for a store that is used during training: they run without the GIL."""

from tiercache.kernels.cpu.checksum import crc32c, has_crc32c
from tiercache.kernels.cpu.hashing import hash_runs
from tiercache.kernels.cpu.key_maps import map_entries
from tiercache.store.segment import Compute

COMPUTE = Compute(hashes=hash_runs, map_entries=map_entries)
if has_crc32c():
    COMPUTE = COMPUTE._replace(checksums=crc32c)
