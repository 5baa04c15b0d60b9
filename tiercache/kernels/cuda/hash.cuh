// Hashes of keys: as cpu/hashing.py.

#pragma once
#include "lanes.cuh"

// splitmix64's finalizer (Steele, Lea, Flood 2014): a bijection.
__device__ __forceinline__ uint64 mix_word(uint64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

__device__ __forceinline__ uint64 hash_of(int64 key, uint64 table_id) {
    return mix_word(static_cast<uint64>(key) ^ table_id);
}
