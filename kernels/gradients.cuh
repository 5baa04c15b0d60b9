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

// The sum of elements [d, d + VEC) of the gradients of pairs [start, stop), in order.
template <int VEC>
__device__ __forceinline__ Lanes<VEC> sum_gradients(
    const Gradients& source, const uint64* pairs, int64 start, int64 stop, int d) {
    Lanes<VEC> sum = zero_lanes<VEC>();
    for (int64 i = start; i < stop; i += GRADIENTS_IN_FLIGHT) {
        uint32 entries[GRADIENTS_IN_FLIGHT];
        int64 begins[GRADIENTS_IN_FLIGHT];
        Lanes<VEC> held[GRADIENTS_IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < GRADIENTS_IN_FLIGHT; ++u) entries[u] = i + u < stop ? entry_of(__ldg(pairs + i + u)) : 0;
#pragma unroll
        for (int u = 0; u < GRADIENTS_IN_FLIGHT; ++u) begins[u] = i + u < stop ? gradient_start(source, entries[u]) : 0;
#pragma unroll
        for (int u = 0; u < GRADIENTS_IN_FLIGHT; ++u) {
            const int64 place = begins[u] >= 0 ? begins[u] : ~begins[u];
            held[u] = i + u < stop ? load_gradient<VEC>(source.flat + place + d) : zero_lanes<VEC>();
        }
#pragma unroll
        for (int u = 0; u < GRADIENTS_IN_FLIGHT; ++u) {
            if (i + u >= stop) continue;
            if (begins[u] >= 0) {
                const float scale = source.scales ? __ldg(source.scales + entries[u]) : 1.0f;
#pragma unroll
                for (int k = 0; k < VEC; ++k) sum.v[k] += held[u].v[k] * scale;
            } else {
                const int* won = source.argmax + ~begins[u] + d;
#pragma unroll
                for (int k = 0; k < VEC; ++k) {
                    if (static_cast<uint32>(__ldg(won + k)) == entries[u]) sum.v[k] += held[u].v[k];
                }
            }
        }
    }
    return sum;
}
