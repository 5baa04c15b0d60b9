// Hashes of keys and the ranks that own them: as bits.py and bucketing.py.

#pragma once
#include "lanes.cuh"

// splitmix64's finaliser (Steele, Lea, Flood 2014): a bijection.
__device__ __forceinline__ uint64 mix_word(uint64 x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

__device__ __forceinline__ uint64 hash_of(int64 key, uint64 table_id) {
    return mix_word(static_cast<uint64>(key) ^ table_id);
}

// The r with floor(r * 2^64 / W) <= hash < floor((r + 1) * 2^64 / W). The high half of hash * W is r, or r - 1 where the
// hash is the very first of range r and r * 2^64 / W is no whole number: adding W once more then passes 2^64.
__device__ __forceinline__ int owner_of(uint64 hash, uint64 num_owners) {
    const uint64 low = hash * num_owners;
    return static_cast<int>(__umul64hi(hash, num_owners)) + (low > 0 - num_owners ? 1 : 0);
}
