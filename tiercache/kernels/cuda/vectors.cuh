// Vectors of float32 or of 16-bit numbers, which kernels see as float32: vectors.py and rounding.py, bit for bit
// (docs/format.md, "Row dtypes").
//
// Kernels that read vectors are templates on T, float or uint16, and have an instantiation for each: float32 has no
// machine code for 16 bits. bfloat16 and float16 share one, and `is_half` says which it is: the few extra
// instructions are hidden by memory latency. Rows of 16 bits begin at words, an even number of elements apart. A lane
// takes 4 numbers in 8 bytes, as one access to outputs, gradients and states has 4: with 8 numbers, the stores of a warp
// would leave gaps, and pooling would take more registers than let four blocks share an SM.

#pragma once
#include "lanes.cuh"
#include "philox.cuh"

typedef unsigned short uint16;

// Numbers in memory format.
template <class T, int VEC> struct Packed;

template <int VEC> struct Packed<float, VEC> {
    Lanes<VEC> lanes;
};

template <int VEC> struct Packed<uint16, VEC> {
    uint32 words[(VEC + 1) / 2];  // the first number lower
};

// Numbers from one row to the next.
template <class T> __device__ __forceinline__ int stride_of(int dim) { return sizeof(T) == 2 ? dim + (dim & 1) : dim; }

template <class T, int VEC> __device__ __forceinline__ Packed<T, VEC> zero_packed() {
    Packed<T, VEC> packed = {};
    return packed;
}

template <int VEC> __device__ __forceinline__ Packed<float, VEC> load_packed(const float* from) {
    return {load_constant<VEC>(from)};
}

template <int VEC> __device__ __forceinline__ Packed<float, VEC> load_written(const float* from) {
    return {load_lanes<VEC>(from)};
}

// For rows that this kernel does not write.
template <int VEC> __device__ __forceinline__ Packed<uint16, VEC> load_packed(const uint16* from) {
    Packed<uint16, VEC> packed;
    if constexpr (VEC == 4) {
        const uint2 two = __ldg(reinterpret_cast<const uint2*>(from));
        packed.words[0] = two.x, packed.words[1] = two.y;
    } else {
        packed.words[0] = __ldg(from);
    }
    return packed;
}

// For rows that it writes.
template <int VEC> __device__ __forceinline__ Packed<uint16, VEC> load_written(const uint16* from) {
    Packed<uint16, VEC> packed;
    if constexpr (VEC == 4) {
        const uint2 two = __ldcg(reinterpret_cast<const uint2*>(from));
        packed.words[0] = two.x, packed.words[1] = two.y;
    } else {
        packed.words[0] = __ldcg(from);
    }
    return packed;
}

#define HALF_FROM 0x38800000u  // 2^-14: below, float16 goes in steps of 2^-24
#define HALF_LESS (112u << 10)  // float32's exponents count from 112 further down
#define HALF_INFINITY 0x7C00u
#define INFINITE 0x7F800000u

// The float32 of a float16. Below 2^-14 it counts steps of 2^-24, and so does a float32 from 0.5 on: none of the numbers
// in between is a subnormal float32, which a GPU may take for zero.
__device__ __forceinline__ float float_of_half(uint32 bits) {
    const uint32 size = bits & 0x7FFFu, less = size < HALF_INFINITY ? HALF_LESS : 2 * HALF_LESS;
    const uint32 small = __float_as_uint(__uint_as_float(0x3F000000u | size) - 0.5f);
    return __uint_as_float((size < 0x0400u ? small : (size + less) << 13) | (bits & 0x8000u) << 16);
}

template <int VEC> __device__ __forceinline__ Lanes<VEC> widen(const Packed<float, VEC>& packed, int) {
    return packed.lanes;
}

template <int VEC> __device__ __forceinline__ Lanes<VEC> widen(const Packed<uint16, VEC>& packed, int is_half) {
    Lanes<VEC> lanes;
#pragma unroll
    for (int i = 0; i < VEC; ++i) {
        const uint32 bits = i % 2 ? packed.words[i / 2] >> 16 : packed.words[i / 2] & 0xFFFFu;
        lanes.v[i] = is_half ? float_of_half(bits) : __uint_as_float(bits << 16);
    }
    return lanes;
}

// The 16 bits of a number that is rounded to `brain` or `half`, which lack its sign; NaN keeps its upper bits. Without
// branches, as lanes seldom agree.
__device__ __forceinline__ uint32 finish(uint32 bits, uint32 brain, uint32 half, int is_half) {
    const uint32 size = bits & 0x7FFFFFFFu;
    half = half < HALF_INFINITY ? half : HALF_INFINITY;
    brain = size < INFINITE ? brain : size >> 16;
    half = size < INFINITE ? half : HALF_INFINITY;
    const uint32 quiet = is_half ? (bits >> 13 & 0x3FFu) | 0x0200u : 0x0040u;
    return (is_half ? half : brain) | (size > INFINITE ? quiet : 0u) | (bits >> 16 & 0x8000u);
}

// The nearest, ties to even.
__device__ __forceinline__ uint32 round_to_nearest(float value, int is_half) {
    const uint32 bits = __float_as_uint(value), size = bits & 0x7FFFFFFFu;
    const uint32 brain = (size + 0x7FFFu + (size >> 16 & 1u)) >> 16;
    const uint32 steps = __float_as_uint(__uint_as_float(size) + 0.5f) - 0x3F000000u;  // 0.5 has steps of 2^-24, too
    const uint32 half = ((size + 0xFFFu + (size >> 13 & 1u)) >> 13) - HALF_LESS;
    return finish(bits, brain, size < HALF_FROM ? steps : half, is_half);
}

// One of the two neighbors, by 16 random bits.
__device__ __forceinline__ uint32 round_by(float value, uint32 noise, int is_half) {
    const uint32 bits = __float_as_uint(value), size = bits & 0x7FFFFFFFu;
    const bool is_small = size < HALF_FROM;
    const float steps = __uint_as_float(is_small ? size : 0u) * 1099511627776.0f;  // 2^40
    const uint32 small = (static_cast<uint32>(static_cast<int>(steps)) + noise) >> 16;
    const uint32 half = ((size + (noise >> 3)) >> 13) - HALF_LESS;
    return finish(bits, (size + noise) >> 16, is_small ? small : half, is_half);
}

// The source of the random bits of a step.
struct Rounding {
    const uint64* streams;  // (S,): of the row in each slot; null for float32
    uint64 step;  // the generator's key: mix(step)
};

// Write elements [d, d + VEC) of a row that a step changed: 16 bits are rounded by the random bits of its stream.
template <int VEC>
__device__ __forceinline__ void store_rounded(float* to, const Lanes<VEC>& lanes, int, uint64, uint64, int) {
    store_lanes<VEC>(to, lanes);
}

template <int VEC>
__device__ __forceinline__ void store_rounded(
    uint16* to, const Lanes<VEC>& lanes, int d, uint64 stream, uint64 step, int is_half) {
    const Words drawn = philox(static_cast<uint32>(stream), static_cast<uint32>(stream >> 32),
                               static_cast<uint32>(d / 8), 0x80000000u, static_cast<uint32>(step),
                               static_cast<uint32>(step >> 32));
    if constexpr (VEC == 4) {
        const uint32 low = d % 8 ? drawn.w[2] : drawn.w[0], high = d % 8 ? drawn.w[3] : drawn.w[1];
        const uint32 a = round_by(lanes.v[0], low & 0xFFFFu, is_half), b = round_by(lanes.v[1], low >> 16, is_half);
        const uint32 c = round_by(lanes.v[2], high & 0xFFFFu, is_half), e = round_by(lanes.v[3], high >> 16, is_half);
        __stcg(reinterpret_cast<uint2*>(to), make_uint2(a | b << 16, c | e << 16));
    } else {
        const uint32 word = d & 4 ? (d & 2 ? drawn.w[3] : drawn.w[2]) : (d & 2 ? drawn.w[1] : drawn.w[0]);
        __stcg(to, static_cast<uint16>(round_by(lanes.v[0], d & 1 ? word >> 16 : word & 0xFFFFu, is_half)));
    }
}

#define ROWS_IN_FLIGHT 4

// Copy up to 32 rows to `to`, `stride` elements apart: lane i holds the slot of row i, -1 for zeros.
template <int VEC, class T>
__device__ __forceinline__ void copy_rows(
    const T* vectors, int is_half, int slot, int count, int dim, int team, float* to, int64 stride) {
    const int teams = 32 / team, own = lane_id() % team, first = lane_id() / team;
    for (int turn = 0; turn < count; turn += teams * ROWS_IN_FLIGHT) {
        int64 from[ROWS_IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < ROWS_IN_FLIGHT; ++u) {
            const int row = turn + u * teams + first;
            const int taken = __shfl_sync(ALL_LANES, slot, row % 32);
            from[u] = row < count ? taken * static_cast<int64>(stride_of<T>(dim)) : -1;
        }
        for (int d = own * VEC; d < dim; d += team * VEC) {
            Packed<T, VEC> held[ROWS_IN_FLIGHT];
#pragma unroll
            for (int u = 0; u < ROWS_IN_FLIGHT; ++u) {
                held[u] = from[u] >= 0 ? load_packed<VEC>(vectors + from[u] + d) : zero_packed<T, VEC>();
            }
#pragma unroll
            for (int u = 0; u < ROWS_IN_FLIGHT; ++u) {
                const int row = turn + u * teams + first;
                if (row < count) store_anywhere<VEC>(to + row * stride + d, widen<VEC>(held[u], is_half));
            }
        }
    }
}
