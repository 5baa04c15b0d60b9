// Where the gradients of a step's entries lie, and adding those of one row up, in order.

#pragma once
#include "lanes.cuh"

struct Gradients {
    const float* flat;  // the gradient of the pooled output, (num_samples, width)
    const int64* offsets;  // (E,): where an entry's gradient begins, the complement for max pooling; null: one id each
    const float* scales;  // (E,): factors of the entries; null: 1
    const int* argmax;  // per element of `flat`, the entry that was largest; null where nothing is max-pooled
    const int64* cols;  // (F,): where offsets are null, the first column of each feature
    int64 num_samples;
    int64 width;
};

#define GRADIENTS_IN_FLIGHT 4

__device__ __forceinline__ uint32 entry_of(uint64 pair) { return static_cast<uint32>(pair); }

__device__ __forceinline__ uint32 slot_of(uint64 pair) { return static_cast<uint32>(pair >> 32); }

__device__ __forceinline__ int64 gradient_start(const Gradients& source, uint32 entry) {
    if (source.offsets) return __ldg(source.offsets + entry);
    const uint32 feature = entry / static_cast<uint32>(source.num_samples);
    const uint32 sample = entry - feature * static_cast<uint32>(source.num_samples);
    return sample * source.width + __ldg(source.cols + feature);
}

// Gradients begin where the model's layout has them: four elements in one access only where they lie so.
template <int VEC> __device__ __forceinline__ Lanes<VEC> load_gradient(const float* from) {
    if constexpr (VEC == 4) {
        if (reinterpret_cast<uint64>(from) % 16 != 0) {
            Lanes<4> lanes;
#pragma unroll
            for (int k = 0; k < 4; ++k) lanes.v[k] = __ldg(from + k);
            return lanes;
        }
    }
    return load_constant<VEC>(from);
}

// Where the gradient of a pair's entry begins, and its factor.
struct __align__(16) Place {
    int64 begin;  // the complement for max pooling
    uint32 entry;
    float scale;
};

__device__ __forceinline__ Place place_of(const Gradients& source, uint64 pair) {
    const uint32 entry = entry_of(pair);
    return {gradient_start(source, entry), entry, source.scales ? __ldg(source.scales + entry) : 1.0f};
}

// Add elements [d, d + VEC) of the gradients of pairs [start, stop) to `sum`, in order; `find` gives a pair's place.
template <int VEC, class FIND>
__device__ __forceinline__ void add_gradients(
    const Gradients& source, int64 start, int64 stop, int d, Lanes<VEC>& sum, const FIND& find) {
    for (int64 i = start; i < stop; i += GRADIENTS_IN_FLIGHT) {
        Place places[GRADIENTS_IN_FLIGHT];
        Lanes<VEC> held[GRADIENTS_IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < GRADIENTS_IN_FLIGHT; ++u) places[u] = find(i + u < stop ? i + u : i);
#pragma unroll
        for (int u = 0; u < GRADIENTS_IN_FLIGHT; ++u) {
            const int64 begin = places[u].begin >= 0 ? places[u].begin : ~places[u].begin;
            held[u] = i + u < stop ? load_gradient<VEC>(source.flat + begin + d) : zero_lanes<VEC>();
        }
#pragma unroll
        for (int u = 0; u < GRADIENTS_IN_FLIGHT; ++u) {
            if (i + u >= stop) continue;
            if (places[u].begin >= 0) {
#pragma unroll
                for (int k = 0; k < VEC; ++k) sum.v[k] += held[u].v[k] * places[u].scale;
            } else {
                const int* won = source.argmax + ~places[u].begin + d;
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    if (static_cast<uint32>(__ldg(won + k)) == places[u].entry) sum.v[k] += held[u].v[k];
                }
            }
        }
    }
}

template <int VEC>
__device__ __forceinline__ void add_pairs(
    const Gradients& source, const uint64* pairs, int64 start, int64 stop, int d, Lanes<VEC>& sum) {
    add_gradients<VEC>(source, start, stop, d, sum, [&](int64 i) { return place_of(source, __ldg(pairs + i)); });
}
