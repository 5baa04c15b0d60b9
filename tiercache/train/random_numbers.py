"""The global random generators of torch, numpy and random: seeding them temporarily and restoring them."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tiercache.store.bits import mix

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WORD = (1 << 64) - 1


def mixed(*words: int) -> int:
    """Return 64 bits that depend on all of ``words``, which are taken modulo 2^64."""
    salt = np.zeros(1, np.uint64)
    for word in words:
        salt = mix(salt ^ np.array([word & _WORD], np.uint64))
    return int(salt[0])


def seed_generators(seed: int) -> None:
    """Seed the CPU generators with 64 bits, but not the generators of GPUs."""
    torch.default_generator.manual_seed(seed)
    np.random.seed([seed & 0xFFFFFFFF, seed >> 32])  # noqa: NPY002 - users' global generator
    random.seed(seed)


def _restorer(*, devices: bool = False) -> Callable[[], None]:
    """Return a function that restores the current states of the generators."""
    of_torch, of_python = torch.get_rng_state(), random.getstate()
    of_numpy: Any = np.random.get_state(legacy=True)  # noqa: NPY002 - users' global generator
    with_devices = devices and torch.cuda.is_available() and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    of_devices = torch.cuda.get_rng_state_all() if with_devices else None

    def restore() -> None:
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        np.random.set_state(of_numpy)  # noqa: NPY002 - users' global generator
        if of_devices is not None:
            torch.cuda.set_rng_state_all(of_devices)

    return restore


@contextmanager
def kept_numbers(*, devices: bool = False) -> Iterator[None]:
    """Restore the generators after the body. devices: also those of GPUs that are in use."""
    restore = _restorer(devices=devices)
    try:
        yield
    finally:
        restore()


class OwnNumbers:
    """Separate generators for code that runs now and then: no other code sees their states."""

    def __init__(self, seed: int) -> None:
        with kept_numbers():
            seed_generators(seed)
            self._restore = _restorer()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run the body with them."""
        with kept_numbers():
            self._restore()
            try:
                yield
            finally:
                self._restore = _restorer()
