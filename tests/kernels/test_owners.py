"""The rank that owns each key, against whole numbers of any size."""

from __future__ import annotations

import numpy as np
import pytest

from tests.kernels.test_key_index import keys_of_hashes
from tiercache.kernels.cpu.hashing import key_owners


def owner_by_definition(hashed: int, num_owners: int) -> int:
    """Return the r with floor(r * 2^64 / W) <= hash < floor((r + 1) * 2^64 / W), by whole numbers."""
    bounds = [r * 2**64 // num_owners for r in range(num_owners + 1)]
    return int(np.searchsorted(np.array(bounds[1:], object), hashed, side="right"))


@pytest.mark.parametrize("num_owners", [1, 2, 3, 5, 7, 64, 100, 1000, 1023, 1024])
def test_a_key_belongs_to_the_rank_whose_range_has_its_hash(num_owners: int) -> None:
    """At every bound, one before and one behind, and at both ends of the hashes: as whole numbers of any size say."""
    bounds = [r * 2**64 // num_owners for r in range(1, num_owners)]
    hashes = [
        0,
        1,
        2**64 - 1,
        2**63,
        *(bound + step for bound in bounds[:: max(1, num_owners // 25)] for step in (-1, 0, 1)),
    ]
    keys, table_id = keys_of_hashes(hashes, 99), 99
    wanted = [owner_by_definition(h, num_owners) for h in hashes]
    owners = np.empty(keys.size, np.int16)
    key_owners(keys, table_id, num_owners, owners)
    assert owners.tolist() == wanted


def test_owners_that_cannot_be_are_refused() -> None:
    """Too few, too many, and room for fewer."""
    keys, owners = np.arange(3), np.zeros(3, np.int16)
    for num_owners in (0, 1025):
        with pytest.raises(ValueError, match=f"{num_owners} owners: from 1 to 1024"):
            key_owners(keys, 0, num_owners, owners)
    with pytest.raises(ValueError, match="one length"):
        key_owners(keys, 0, 2, owners[:2])
