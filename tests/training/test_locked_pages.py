"""Pages of host memory that the GPU's driver had locked move as others do, and the GPU reads them there."""

from __future__ import annotations

import numpy as np
import pytest

from tests.training.devices import cuda_device
from tiercache.backends.base import Backend, Layout
from tiercache.backends.opening import open_backend
from tiercache.planning.budget import PAGE_BYTES
from tiercache.tiers.pinned_region import PinnedRegion, moves_pages

PAGES, WIDTH = 64, 16
ROWS = PAGES * PAGE_BYTES // (4 * WIDTH)


def on_the_device(backend: Backend, region: PinnedRegion) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Have the device read the first pages of a region as rows, and return what it read."""
    (there,) = backend.reserve([Layout(ROWS, (WIDTH,), ROWS, rounded=False)], "rows of a test")
    slots, pieces = backend.indices(ROWS), backend.pieces(WIDTH)
    slots[:] = np.arange(ROWS)
    pieces.add(0, np.array([ROWS]), np.array([0]), region.data.view(np.float32))
    with backend.streams.loading():
        backend.unpack(there.fields, backend.place(slots, there.slots), pieces)
        backend.streams.loaded().wait()
        return backend.read(there.fields[0], slice(None)).copy()


def test_pages_that_were_locked_move_with_what_they_have() -> None:
    """Locked, read, unlocked and moved, there and back: no byte is another."""
    if not moves_pages():
        pytest.skip("this system does not move pages and leave the map they were in: Linux does since 5.7")
    backend = open_backend(cuda_device(), ())
    source, target = (PinnedRegion(2 * PAGES * PAGE_BYTES, backend) for _ in range(2))
    source.hold(0, PAGES)
    source.hand_out(PAGES * PAGE_BYTES)
    rows = np.random.default_rng(0).standard_normal((ROWS, WIDTH)).astype(np.float32)
    source.data.view(np.float32)[:] = rows.reshape(-1)
    for _ in range(4):
        assert np.array_equal(on_the_device(backend, source), rows)
        source.hold(0, 0)
        assert target.bring(0, PAGES, source, 0)
        target.hold(0, PAGES)
        target.hand_out(PAGES * PAGE_BYTES)
        assert np.array_equal(target.data.view(np.float32), rows.reshape(-1))
        source, target = target, source
    source.unpin()
