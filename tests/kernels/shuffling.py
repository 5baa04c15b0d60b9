"""The order of shuffled samples as docs/format defines it, one place at a time: the slow oracle of the kernel."""

from __future__ import annotations

MASK = 2**64 - 1


def mix(x: int) -> int:
    """The finalizer of splitmix64."""
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ x >> 27) * 0x94D049BB133111EB & MASK
    return x ^ x >> 31


def sample_at(place: int, count: int, state: int) -> int:
    """Return the sample at a place of the order of ``count`` samples that a state decides."""
    bits = next(b for b in range(8, 65) if 2**b >= count)
    high_size, low_size = 2 ** (bits // 2), 2 ** ((bits + 1) // 2)
    keys = [mix(state + j * 0x9E3779B97F4A7C15 & MASK) for j in range(1, 7)]
    while True:
        high, low = divmod(place, low_size)
        for j in (0, 2, 4):
            high = (high ^ mix(low ^ keys[j])) % high_size
            low = (low ^ mix(high ^ keys[j + 1])) % low_size
        place = high * low_size + low
        if place < count:
            return place
