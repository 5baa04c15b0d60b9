"""The rank that owns each key. Serial kernel.

Owner r of W has the keys whose hash `mix(key ^ table id)` lies in [floor(r * 2^64 / W), floor((r + 1) * 2^64 / W)).
"""

import numpy as np

from tiercache.kernels.arrays import I2, I8, Word, Written, same_length
from tiercache.kernels.cpu.hashing import mix_word
from tiercache.kernels.cpu.jit import inlined, serial

__all__ = ["MOST_OWNERS", "key_owners"]

MOST_OWNERS = 1024

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@inlined
def _owner(hashed, num_owners):  # type: ignore[no-untyped-def]
    """Return the rank whose range has a hash.

    The high half of the product with W is the rank, or one less where the hash is the first of its range and the
    range's exact bound no whole number: adding W once more then passes 2^64.
    """
    product = (hashed & _LOW) * num_owners
    high = ((hashed >> _HALF) * num_owners + (product >> _HALF)) >> _HALF
    return np.int64(high) + (1 if hashed * num_owners > np.uint64(0) - num_owners else 0)


@serial
def _key_owners(keys: I8, table_id: Word, num_owners: Word, owners: Written[I2]) -> None:
    for i in range(keys.size):
        owners[i] = _owner(mix_word(np.uint64(keys[i]) ^ table_id), num_owners)


def key_owners(keys: I8, table_id: int, num_owners: int, owners: I2) -> None:
    """Write the owner of each key (n,) to `owners` (n,). Raises ValueError for too many owners."""
    same_length(keys=keys, owners=owners)
    if not 1 <= num_owners <= MOST_OWNERS:
        raise ValueError(f"{num_owners} owners: from 1 to {MOST_OWNERS} are possible.")
    _key_owners(keys, table_id, num_owners, owners)
