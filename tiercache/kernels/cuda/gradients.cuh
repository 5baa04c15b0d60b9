// The locations of the gradients of a step's entries, and the sum of one row's gradients, in order.

#pragma once
#include "lanes.cuh"

struct Source {  // the gradient of one feature, or of all features of a lookup with bags
    const float* flat;
    int64 stride;  // elements from one sample's gradient to the next
    int64 width;  // elements of a sample, if `places` count those alone and nothing is max-pooled; else 0
    const int64* places;  // the start of an entry's gradient in `flat`, its complement for max pooling
    const float* scales;  // factors of the entries; null: 1
    const int* argmax;  // per element of `flat`, the largest entry; null if nothing is max-pooled
    int64 begin;  // the first entry of the group in this source
};

struct Gradients {
    const Source* sources;  // in the order of entries
    int num_sources;
    int per_source;  // entries of each; 0 if they differ
    int is_plain;  // 1 if no source has places or scales
    int has_max;
    int is_aligned;  // 1 if every gradient is known to begin at a multiple of 16 bytes
};

#define GRADIENTS_IN_FLIGHT 4

__device__ __forceinline__ const Source& source_of(const Gradients& gradients, uint32 entry) {
    if (gradients.per_source) return gradients.sources[entry / static_cast<uint32>(gradients.per_source)];
    int low = 0, high = gradients.num_sources;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (__ldg(&gradients.sources[middle].begin) <= entry) low = middle;
        else high = middle;
    }
    return gradients.sources[low];
}

// The start of an entry's gradient in `flat`; of max pooling, the complement of it.
__device__ __forceinline__ int64 start_of(const Source& source, int64 number) {
    if (!source.places) return number * source.stride;
    const int64 place = __ldg(source.places + number);
    return source.width ? place + place / source.width * (source.stride - source.width) : place;
}

// The start of an entry's gradient, and its factor.
struct Place {
    const float* from;
    float scale;
};

__device__ __forceinline__ Place place_of(const Gradients& gradients, uint32 entry) {
    const Source& source = source_of(gradients, entry);
    const int64 number = entry - __ldg(&source.begin);
    const float* flat = reinterpret_cast<const float*>(__ldg(reinterpret_cast<const int64*>(&source.flat)));
    if (gradients.is_plain) return {flat + number * __ldg(&source.stride), 1.0f};
    return {flat + start_of(source, number), source.scales ? __ldg(source.scales + number) : 1.0f};
}

// Add elements [d, d + VEC) of the gradients of entries [start, stop) of the order; each lane looks all of them up.
template <int VEC>
__device__ __forceinline__ void add_each(
    const Gradients& gradients, const uint32* entries, int start, int stop, int d, Lanes<VEC>& sum) {
    for (int i = start; i < stop; i += GRADIENTS_IN_FLIGHT) {
        Lanes<VEC> held[GRADIENTS_IN_FLIGHT];
        float scales[GRADIENTS_IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < GRADIENTS_IN_FLIGHT; ++u) {
            if (i + u >= stop) continue;
            const Place place = place_of(gradients, __ldg(entries + i + u));
            scales[u] = place.scale;
            held[u] = load_anywhere<VEC>(place.from + d);
        }
#pragma unroll
        for (int u = 0; u < GRADIENTS_IN_FLIGHT; ++u) {
            if (i + u >= stop) continue;
#pragma unroll
            for (int k = 0; k < VEC; ++k) sum.v[k] += held[u].v[k] * scales[u];
        }
    }
}

// The same if some source is max-pooled: an element counts only for its largest entry.
template <int VEC>
__device__ __forceinline__ void add_largest(
    const Gradients& gradients, const uint32* entries, int start, int stop, int d, Lanes<VEC>& sum) {
    for (int i = start; i < stop; i += GRADIENTS_IN_FLIGHT) {
        Lanes<VEC> held[GRADIENTS_IN_FLIGHT];
        float scales[GRADIENTS_IN_FLIGHT];
        uint32 won[GRADIENTS_IN_FLIGHT];  // which of the elements count
#pragma unroll
        for (int u = 0; u < GRADIENTS_IN_FLIGHT; ++u) {
            if (i + u >= stop) continue;
            const uint32 entry = __ldg(entries + i + u);
            const Source& source = source_of(gradients, entry);
            const int64 number = entry - source.begin;
            const int64 place = start_of(source, number);
            const int64 at = (place >= 0 ? place : ~place) + d;
            held[u] = load_anywhere<VEC>(source.flat + at);
            scales[u] = place >= 0 && source.scales ? __ldg(source.scales + number) : 1.0f;
            won[u] = 0u;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                won[u] |= (place >= 0 || __ldg(source.argmax + at + k) == number ? 1u : 0u) << k;
            }
        }
#pragma unroll
        for (int u = 0; u < GRADIENTS_IN_FLIGHT; ++u) {
            if (i + u >= stop) continue;
#pragma unroll
            for (int k = 0; k < VEC; ++k) {
                if (won[u] >> k & 1u) sum.v[k] += held[u].v[k] * scales[u];
            }
        }
    }
}

// The same for a team of at least four lanes, each of which looks up an entry for all; nothing is max-pooled.
__device__ __forceinline__ void add_by_team(
    const Gradients& gradients, const uint32* entries, int start, int stop, int d, Lanes<4>& sum, int team) {
    const uint32 mask = team_mask(team);
    const int own = lane_id() % team;
#pragma unroll 1
    for (int from = start; from < stop; from += team) {
        const int count = stop - from < team ? stop - from : team;
        const Place mine = place_of(gradients, __ldg(entries + from + (own < count ? own : 0)));
        if (!gradients.is_aligned) {  // one after another, which takes fewer registers than the others have anyway
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                const uint64 at = __shfl_sync(mask, reinterpret_cast<uint64>(mine.from), i, team);
                const Lanes<4> one = load_anywhere<4>(reinterpret_cast<const float*>(at) + d);
                const float scale = __shfl_sync(mask, mine.scale, i, team);
#pragma unroll
                for (int k = 0; k < 4; ++k) sum.v[k] += one.v[k] * scale;
            }
            continue;
        }
#pragma unroll 1
        for (int i = 0; i < count; i += GRADIENTS_IN_FLIGHT) {
            Lanes<4> held[GRADIENTS_IN_FLIGHT];
#pragma unroll
            for (int u = 0; u < GRADIENTS_IN_FLIGHT; ++u) {
                const int lane = i + u < count ? i + u : i;
                const uint64 at = __shfl_sync(mask, reinterpret_cast<uint64>(mine.from), lane, team);
                held[u] = load_constant<4>(reinterpret_cast<const float*>(at) + d);
            }
#pragma unroll
            for (int u = 0; u < GRADIENTS_IN_FLIGHT; ++u) {
                const float scale = gradients.is_plain ? 1.0f : __shfl_sync(mask, mine.scale, i + u, team);
                if (i + u >= count) continue;
#pragma unroll
                for (int k = 0; k < 4; ++k) sum.v[k] += held[u].v[k] * scale;
            }
        }
    }
}

// Add elements [d, d + VEC) of the gradients of entries [start, stop) of the order to `sum`, in order; a team does it.
template <int VEC, bool ANY>
__device__ __forceinline__ void add_gradients(
    const Gradients& gradients, const uint32* entries, int start, int stop, int d, Lanes<VEC>& sum, int team) {
    if constexpr (!ANY) add_by_team(gradients, entries, start, stop, d, sum, team);
    else if (gradients.has_max) add_largest<VEC>(gradients, entries, start, stop, d, sum);
    else add_each<VEC>(gradients, entries, start, stop, d, sum);
}
