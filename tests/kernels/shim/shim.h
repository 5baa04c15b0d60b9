// CUDA's words on the CPU, for tests: a thread is a fibre, the blocks of a launch run one after another.
//
// A fibre runs until it waits: at __syncthreads, or at a warp's operation until all lanes of its mask are there. Which
// runs next is the order of the launch: by thread number, from the last to the first, or drawn anew from a seed each
// time; blocks take turns in it too. So what one thread reads of another's without a barrier is there in one order and
// missing in the next. Shared memory is filled with rubbish before each block. A bad address, a wait that cannot end
// and a lane that is not in its own mask end the launch with a sentence. What this cannot see: races between blocks
// that are ordered by chance on a GPU, and the memory model.

#pragma once

#include <cmath>

#include "fibres.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__ __restrict
#define __grid_constant__
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __align__(n) alignas(n)
#define __constant__ static const
#define __shared__ static __attribute__((section("shim_shared"), used))

struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }

#define threadIdx (shim::current->thread)
#define blockIdx (shim::block_index)
#define blockDim (shim::block_size)
#define gridDim (shim::grid_size)
constexpr int warpSize = 32;

inline void __syncthreads() { shim::sync_threads(); }
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __syncwarp(unsigned mask = 0xFFFFFFFFu) { shim::leave(shim::meet(mask, 0, nullptr)); }

inline unsigned __ballot_sync(unsigned mask, int predicate) {
    shim::Meeting* meeting = shim::meet(mask, predicate != 0, "ballot");
    unsigned votes = 0;
    for (int i = 0; i < 32; ++i) votes |= (mask >> i & 1 && meeting->values[i]) ? 1u << i : 0u;
    shim::leave(meeting);
    return votes;
}
inline int __any_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) != 0; }
inline int __all_sync(unsigned mask, int predicate) { return __ballot_sync(mask, predicate) == mask; }
template <class T> unsigned __match_any_sync(unsigned mask, T value) {
    shim::Meeting* meeting = shim::meet(mask, shim::bits_of(value), "match");
    unsigned equal = 0;
    for (int i = 0; i < 32; ++i) equal |= (mask >> i & 1 && meeting->values[i] == shim::bits_of(value)) ? 1u << i : 0u;
    shim::leave(meeting);
    return equal;
}
template <class T> T __shfl_sync(unsigned mask, T value, int from, int width = 32) {
    const unsigned base = shim::lane() / width * width;
    return shim::shuffle(mask, value, base + static_cast<unsigned>(from) % width, "shfl");
}
template <class T> T __shfl_xor_sync(unsigned mask, T value, int other, int width = 32) {
    const unsigned lane = shim::lane(), from = lane ^ other;
    return shim::shuffle(mask, value, from / width <= lane / width ? from : lane, "xor");
}
template <class T> T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const unsigned lane = shim::lane();
    return shim::shuffle(mask, value, lane % width < delta ? lane : lane - delta, "up");
}
template <class T> T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32) {
    const unsigned lane = shim::lane();
    return shim::shuffle(mask, value, lane % width + delta >= unsigned(width) ? lane : lane + delta, "down");
}

template <class T> T __ldg(const T* from) { return *from; }
template <class T> T __ldcs(const T* from) { return *from; }
template <class T> T __ldcg(const T* from) { return *from; }
template <class T> void __stcs(T* to, T value) { *to = value; }
template <class T> void __stcg(T* to, T value) { *to = value; }

template <class T, class U> T atomicAdd(T* at, U value) {
    const T before = *at;
    *at = before + static_cast<T>(value);
    return before;
}
template <class T, class U> T atomicMin(T* at, U value) {
    const T before = *at;
    if (static_cast<T>(value) < before) *at = value;
    return before;
}
template <class T, class U> T atomicMax(T* at, U value) {
    const T before = *at;
    if (static_cast<T>(value) > before) *at = value;
    return before;
}
template <class T, class U> T atomicOr(T* at, U value) {
    const T before = *at;
    *at = before | static_cast<T>(value);
    return before;
}
template <class T, class U> T atomicExch(T* at, U value) {
    const T before = *at;
    *at = value;
    return before;
}
template <class T, class U, class V> T atomicCAS(T* at, U expected, V value) {
    const T before = *at;
    if (before == static_cast<T>(expected)) *at = value;
    return before;
}

inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline int __clz(int value) { return value ? __builtin_clz(value) : 32; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(uint64_t(a) * b >> 32); }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
inline float __uint_as_float(unsigned bits) { return shim::value_of<float>(bits); }
inline unsigned __float_as_uint(float value) { return static_cast<unsigned>(shim::bits_of(value)); }
inline int __float_as_int(float value) { return static_cast<int>(shim::bits_of(value)); }
inline float __fsqrt_rn(float value) { return sqrtf(value); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
using std::max;
using std::min;
