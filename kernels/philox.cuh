// Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011) and what is made of its words: as initial.py, operation by operation,
// which is where the bits are defined (docs/format.md, "Bits").

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

// The natural logarithm of a number in (0, 1].
__device__ __forceinline__ float log_of(float x) {
    const int pattern = __float_as_int(x) - 0x3F3504F3;  // mantissa from sqrt(1/2) to sqrt(2)
    const float exponent = static_cast<float>(pattern >> 23);
    const float mantissa = __uint_as_float(static_cast<uint32>((pattern & 0x7FFFFF) + 0x3F3504F3));
    const float s = (mantissa - 1.0f) / (mantissa + 1.0f), z = s * s;
    const float series =
        z * (static_cast<float>(1.0 / 3) +
             z * (static_cast<float>(1.0 / 5) + z * (static_cast<float>(1.0 / 7) + z * static_cast<float>(1.0 / 9))));
    return exponent * static_cast<float>(0.6931471805599453) + 2.0f * (s + s * series);
}

// A pair of normal numbers by Box and Muller from two words.
__device__ __forceinline__ void normal_pair(
    uint32 first, uint32 second, float mean, float deviation, float& a, float& b) {
    const float unit = static_cast<float>((first >> 8) + 1) * TWO_TO_MINUS_24;  // in (0, 1]
    const float radius = deviation * __fsqrt_rn(-2.0f * log_of(unit));
    const float quarters = unit_of(second) * 4.0f;
    const int quarter = static_cast<int>(quarters + 0.5f);
    const float x = (quarters - static_cast<float>(quarter)) * static_cast<float>(1.5707963267948966), z = x * x;
    float sine = static_cast<float>(-1.0 / 6) +
                 z * (static_cast<float>(1.0 / 120) +
                      z * (static_cast<float>(-1.0 / 5040) + z * static_cast<float>(1.0 / 362880)));
    sine = x + x * (z * sine);
    float cosine = static_cast<float>(1.0 / 24) -
                   z * (static_cast<float>(1.0 / 720) -
                        z * (static_cast<float>(1.0 / 40320) - z * static_cast<float>(1.0 / 3628800)));
    cosine = 1.0f - 0.5f * z + (z * z) * cosine;
    const bool swapped = quarter & 1;
    const float up = swapped ? cosine : sine, along = swapped ? sine : cosine;
    a = mean + radius * ((quarter + 1) & 2 ? -along : along);
    b = mean + radius * (quarter & 2 ? -up : up);
}
