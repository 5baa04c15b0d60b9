// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011) and numbers made of its words: as initial.py, operation by operation,
// which defines the bits (docs/format.md, "Bits").

#pragma once
#include "lanes.cuh"

struct Words {
    uint32 w[4];
};

__device__ __forceinline__ Words philox(uint32 c0, uint32 c1, uint32 c2, uint32 c3, uint32 k0, uint32 k1) {
#pragma unroll
    for (int i = 0; i < 10; ++i) {
        const uint32 high0 = __umulhi(c0, 0xD2511F53u), low0 = c0 * 0xD2511F53u;
        const uint32 high1 = __umulhi(c2, 0xCD9E8D57u), low1 = c2 * 0xCD9E8D57u;
        c0 = high1 ^ c1 ^ k0, c1 = low1, c2 = high0 ^ c3 ^ k1, c3 = low0;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return {{c0, c1, c2, c3}};
}

// The words of elements 4 * block to 4 * block + 3 of a key's row; `stream` is mix(seed ^ table id).
__device__ __forceinline__ Words words_of_row(int64 key, uint32 block, uint64 stream) {
    const uint64 bits = static_cast<uint64>(key);
    return philox(static_cast<uint32>(bits), static_cast<uint32>(bits >> 32), block, 0u, static_cast<uint32>(stream),
                  static_cast<uint32>(stream >> 32));
}

#define TWO_TO_MINUS_24 5.9604644775390625e-08f

__device__ __forceinline__ float unit_of(uint32 word) { return static_cast<float>(word >> 8) * TWO_TO_MINUS_24; }
