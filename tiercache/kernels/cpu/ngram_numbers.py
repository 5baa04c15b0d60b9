"""N-grams of tokens, as numbers from which keys are made.

A token at some distance from the last one of an n-gram is multiplied by the factor of that distance, and the products
are combined by exclusive or, modulo 2^64. Factors that are powers of two beyond the range of tokens give each n-gram a
unique number; odd factors hash. Legend: N sequences, T tokens of each, K factors, O orders, H heads, U n-grams.
"""

from tiercache.kernels.arrays import I8, Matrix, Written
from tiercache.kernels.cpu.compile import serial


@serial
def mix_ngrams(
    tokens: Matrix[I8],  # (N, T)
    factors: I8,  # (K,)
    orders: I8,  # (O,) from 2 to K, ascending
    border: int,
    padding: int,
    mixed: Written[Matrix[I8]],  # (O, N * T)
) -> None:
    """Write the number of each n-gram of each order that ends at a token.

    An n-gram has no token from before the beginning of its sequence, nor `border` or any token before it unless that is
    its last: `padding` takes their places.
    """
    num_orders, last = orders.size, orders[orders.size - 1]
    length = tokens.shape[1]
    for n in range(tokens.shape[0]):
        begin = 0
        for t in range(length):
            number, at = tokens[n, t] * factors[0], 0
            for k in range(1, last):
                token = tokens[n, t - k] if t - k >= begin else padding
                number ^= token * factors[k]
                if at < num_orders and orders[at] == k + 1:
                    mixed[at, n * length + t] = number
                    at += 1
            if tokens[n, t] == border:
                begin = t + 1


@serial
def spread_ngrams(
    mixed: I8,  # (U,)
    moduli: I8,  # (H,) positive; 0: none
    offsets: I8,  # (H,)
    first: int,
    keys: Written[Matrix[I8]],  # (U, columns)
) -> None:
    """Write the keys of n-grams to columns `first` to `first` + H: the remainder by a modulus, plus an offset.

    The remainder is at least 0, also for a negative number.
    """
    for h in range(moduli.size):
        modulus, offset = moduli[h], offsets[h]
        if modulus == 0:
            for u in range(mixed.size):
                keys[u, first + h] = mixed[u] + offset
            continue
        for u in range(mixed.size):
            rest = mixed[u] % modulus
            keys[u, first + h] = (rest + modulus if rest < 0 else rest) + offset
