// Lookup with pooling: a warp takes 32 samples of one feature, of one id each or with a bag of any number of ids.
//
// Sums are in the order of a bag's entries, so the bits equal those of the CPU's kernels.

#include "ids.cuh"
#include "lanes.cuh"
#include "vectors.cuh"

#define SUM 0
#define MEAN 1
#define MAX 2

struct PoolFeature {  // one feature of a plan
    const void* vectors;  // (S, dim) float32, or 16-bit numbers
    const int* slot_of_local;  // (L,)
    int64 base;  // the first local position of the feature's table
    int64 limit;  // its number of keys
    int64 col;
    int group;  // of its ids in the batch
    int number;  // among the features of its group
    int dim;
    int vec;
    int team;
    int mode;
    int is_half;
};

struct PoolBatch {  // the ids of one group
    const void* ids;  // (E,)
    int* slots;  // (E,), written
    const int64* offsets;  // (features * num_samples + 1,): starts of bags; null if each sample has one id
    const float* weights;  // (E,), or null: 1
    int* argmax;  // (num_samples, width), or null if no feature is MAX
    int64* entry_offset;  // (E,), or null if each sample has one id
    float* entry_scale;  // (E,), or null: all are 1
    int64 wide;  // ids are int64
};

struct PoolPart {  // one feature of a batch
    const PoolFeature& of;
    const PoolBatch& batch;
    float* out;  // (num_samples, width)
    int64 num_samples;
    int64 width;
};

__device__ __forceinline__ int slot_of(const PoolPart& part, int64 entry) {
    return slot_of_entry(part.batch.ids, part.batch.wide, entry, part.of.slot_of_local + part.of.base, part.of.limit);
}

#define ENTRIES_IN_FLIGHT 4

// The starts of the feature's bags.
__device__ __forceinline__ const int64* bags_of(const PoolPart& part) {
    return part.batch.offsets + part.of.number * part.num_samples;
}

__device__ __forceinline__ float weight_of(const PoolPart& part, int64 entry) {
    return part.batch.weights ? __ldg(part.batch.weights + entry) : 1.0f;
}

// Elements [d, d + VEC) of the rows of entries [first, last), as many as are in flight at a time; then zeros.
template <class T, int VEC>
__device__ __forceinline__ void load_entries(
    const PoolPart& part, int64 first, int64 last, int d, Packed<T, VEC> (&rows)[ENTRIES_IN_FLIGHT]) {
    const T* vectors = static_cast<const T*>(part.of.vectors);
    int slots[ENTRIES_IN_FLIGHT];
#pragma unroll
    for (int u = 0; u < ENTRIES_IN_FLIGHT; ++u) slots[u] = first + u < last ? part.batch.slots[first + u] : -1;
#pragma unroll
    for (int u = 0; u < ENTRIES_IN_FLIGHT; ++u) {
        rows[u] = slots[u] >= 0 ? load_packed<VEC>(vectors + slots[u] * static_cast<int64>(stride_of<T>(part.of.dim)) + d)
                                : zero_packed<T, VEC>();
    }
}

template <class T, int VEC>
__device__ __forceinline__ Lanes<VEC> sum_bag(const PoolPart& part, int64 first, int64 last, int d) {
    Lanes<VEC> sum = zero_lanes<VEC>();
    for (int64 e = first; e < last; e += ENTRIES_IN_FLIGHT) {
        Packed<T, VEC> rows[ENTRIES_IN_FLIGHT];
        load_entries<T, VEC>(part, e, last, d, rows);
#pragma unroll
        for (int u = 0; u < ENTRIES_IN_FLIGHT; ++u) {
            if (e + u < last) {
                const float weight = weight_of(part, e + u);
                const Lanes<VEC> row = widen<VEC>(rows[u], part.of.is_half);
#pragma unroll
                for (int i = 0; i < VEC; ++i) sum.v[i] += row.v[i] * weight;
            }
        }
    }
    if (part.of.mode == MEAN && last > first + 1) {
        const float ids = static_cast<float>(last - first);
#pragma unroll
        for (int i = 0; i < VEC; ++i) sum.v[i] /= ids;
    }
    return sum;
}

template <class T, int VEC>
__device__ __forceinline__ Lanes<VEC> max_bag(const PoolPart& part, int64 first, int64 last, int d, int* argmax) {
    Lanes<VEC> largest = zero_lanes<VEC>();
    int which[VEC];
#pragma unroll
    for (int i = 0; i < VEC; ++i) which[i] = -1;
    for (int64 e = first; e < last; e += ENTRIES_IN_FLIGHT) {
        Packed<T, VEC> rows[ENTRIES_IN_FLIGHT];
        load_entries<T, VEC>(part, e, last, d, rows);
#pragma unroll
        for (int u = 0; u < ENTRIES_IN_FLIGHT; ++u) {
            const Lanes<VEC> row = widen<VEC>(rows[u], part.of.is_half);
#pragma unroll
            for (int i = 0; i < VEC; ++i) {
                if (e + u < last && (e + u == first || row.v[i] > largest.v[i])) {
                    largest.v[i] = row.v[i];
                    which[i] = static_cast<int>(e + u);
                }
            }
        }
    }
#pragma unroll
    for (int i = 0; i < VEC; ++i) argmax[i] = which[i];
    return largest;
}

// Write the location and the factor of each gradient of a bag's entries, for the step.
__device__ __forceinline__ void describe(const PoolPart& part, int64 first, int64 last, int64 place) {
    const float share = part.of.mode == MEAN ? static_cast<float>(last - first) : 1.0f;
    for (int64 e = first + lane_id() % part.of.team; e < last; e += part.of.team) {
        part.batch.entry_offset[e] = part.of.mode == MAX ? ~place : place;
        if (part.batch.entry_scale) part.batch.entry_scale[e] = (part.of.mode == MAX ? 1.0f : weight_of(part, e)) / share;
    }
}

template <class T, int VEC>
__device__ __forceinline__ void pool_bags(const PoolPart& part, int64 first_sample, int count) {
    const int64* offsets = bags_of(part) + first_sample;
    for (int64 e = offsets[0] + lane_id(); e < offsets[count]; e += 32) part.batch.slots[e] = slot_of(part, e);
    __syncwarp();  // from here on lanes read slots that other lanes wrote
    for (int n = lane_id() / part.of.team; n < count; n += 32 / part.of.team) {
        const int64 first = offsets[n], last = offsets[n + 1];
        const int64 place = (first_sample + n) * part.width + part.of.col;
        describe(part, first, last, place);
        for (int d = lane_id() % part.of.team * VEC; d < part.of.dim; d += part.of.team * VEC) {
            const Lanes<VEC> pooled = part.of.mode == MAX ? max_bag<T, VEC>(part, first, last, d, part.batch.argmax + place + d)
                                                       : sum_bag<T, VEC>(part, first, last, d);
            store_anywhere<VEC>(part.out + place + d, pooled);
        }
    }
}

template <class T, int VEC>
__device__ __forceinline__ void pool_samples(const PoolPart& part, int64 first, int count) {
    if (part.batch.offsets) {
        pool_bags<T, VEC>(part, first, count);
        return;
    }
    int slot = -1;
    if (lane_id() < count) {
        const int64 entry = part.of.number * part.num_samples + first + lane_id();
        slot = slot_of(part, entry);
        part.batch.slots[entry] = slot;
    }
    copy_rows<VEC>(
        static_cast<const T*>(part.of.vectors), part.of.is_half, slot, count, part.of.dim, part.of.team,
        part.out + first * part.width + part.of.col, part.width);
}

// Row times gradient of each entry, summed as the CPU's kernel sums: 16 sums, added by halves.
template <class T, int VEC>
__device__ __forceinline__ void weigh_bags(
    const PoolPart& part, const float* gradient, float* out, int64 first, int count) {
    const int team = part.of.team, own = lane_id() % team;
    const uint32 mask = team_mask(team);
    for (int n = lane_id() / team; n < count; n += 32 / team) {
        const int64 begin = bags_of(part)[first + n], end = bags_of(part)[first + n + 1];
        const float* at = gradient + (first + n) * part.width + part.of.col;
        for (int64 e = begin; e < end; ++e) {
            const int slot = __ldg(part.batch.slots + e);
            Lanes<VEC> classes = zero_lanes<VEC>();
            for (int start = 0; start < part.of.dim; start += team * VEC) {
                const int d = start + own * VEC;
                Lanes<VEC> products = zero_lanes<VEC>();
                if (d < part.of.dim && slot >= 0) {
                    const T* vectors = static_cast<const T*>(part.of.vectors);
                    const T* row = vectors + slot * static_cast<int64>(stride_of<T>(part.of.dim));
                    products = widen<VEC>(load_packed<VEC>(row + d), part.of.is_half);
                    const Lanes<VEC> factors = load_anywhere<VEC>(at + d);
#pragma unroll
                    for (int i = 0; i < VEC; ++i) products.v[i] *= factors.v[i];
                }
                add_classes<VEC>(classes, products, team, mask);
            }
            const float sum = total<VEC>(classes, team, mask);
            if (own == 0) out[e] = part.of.mode == MEAN ? sum / static_cast<float>(end - begin) : sum;
        }
    }
}

// A task is 32 samples of one feature; `chunks` tasks make a feature. For weight gradients, `out` is the gradient, which
// is read, and the batch's `entry_scale` receives the gradient of the weights.
template <class T, bool WEIGHS>
__device__ __forceinline__ void do_features(
    const PoolFeature* features, int64 num_features, int64 chunks, const Parts<PoolBatch>& batch, float* out,
    int64 num_samples, int64 width) {
    for (int64 task = warp_id(); task < num_features * chunks; task += num_warps()) {
        const PoolFeature& feature = features[task / chunks];
        const PoolPart part = {feature, batch.parts[feature.group], out, num_samples, width};
        const int64 first = task % chunks * 32;
        const int count = num_samples - first < 32 ? static_cast<int>(num_samples - first) : 32;
        if constexpr (WEIGHS) {
            if (part.of.vec == 4) weigh_bags<T, 4>(part, part.out, part.batch.entry_scale, first, count);
            else weigh_bags<T, 1>(part, part.out, part.batch.entry_scale, first, count);
        } else {
            if (part.of.vec == 4) pool_samples<T, 4>(part, first, count);
            else pool_samples<T, 1>(part, first, count);
        }
    }
}

#define POOL_KERNEL(NAME, T, WEIGHS) \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 4) \
    NAME(const PoolFeature* features, int64 num_features, int64 chunks, \
         const __grid_constant__ Parts<PoolBatch> batch, float* out, int64 num_samples, int64 width) { \
        do_features<T, WEIGHS>(features, num_features, chunks, batch, out, num_samples, width); \
    }

POOL_KERNEL(pool, float, false)
POOL_KERNEL(pool_narrow, uint16, false)
POOL_KERNEL(weight_gradient, float, true)
POOL_KERNEL(weight_gradient_narrow, uint16, true)
