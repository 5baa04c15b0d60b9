// Lookup with pooling: a warp takes 32 samples of one feature, of one id each or with a bag of any number of ids.
//
// Sums go over the entries of a bag in order, so that bits are those of the CPU's kernels.

#include "ids.cuh"
#include "lanes.cuh"
#include "vectors.cuh"

#define SUM 0
#define MEAN 1
#define MAX 2

struct PoolPart {  // one feature
    int64 first_task;  // a task is 32 samples
    const void* vectors;  // (S, dim) float32, or 16-bit numbers
    Ids ids;
    const int64* offsets;  // (num_samples + 1,): where the feature's bags begin; null where each sample has one id
    const float* weights;  // (E,), or null: 1
    float* out;  // (num_samples, width)
    int* argmax;  // (num_samples, width), or null where the feature is not MAX
    int64* entry_offset;  // (E,), or null where each sample has one id
    float* entry_scale;  // (E,), or null: all are 1
    int64 first_entry;  // where each sample has one id: that of sample 0
    int64 num_samples;
    int64 width;
    int64 col;
    int dim;
    int vec;
    int team;
    int mode;
    int is_half;
    int unused;
};
static_assert(sizeof(PoolPart) == 168, "as POOL_PART in pooling.py");

#define ENTRIES_IN_FLIGHT 4

__device__ __forceinline__ float weight_of(const PoolPart& part, int64 entry) {
    return part.weights ? __ldg(part.weights + entry) : 1.0f;
}

// Elements [d, d + VEC) of the rows of entries [first, last), as many as are in flight at a time; zeros behind.
template <class T, int VEC>
__device__ __forceinline__ void load_entries(
    const PoolPart& part, int64 first, int64 last, int d, Packed<T, VEC> (&rows)[ENTRIES_IN_FLIGHT]) {
    const T* vectors = static_cast<const T*>(part.vectors);
    int slots[ENTRIES_IN_FLIGHT];
#pragma unroll
    for (int u = 0; u < ENTRIES_IN_FLIGHT; ++u) slots[u] = first + u < last ? part.ids.slots[first + u] : -1;
#pragma unroll
    for (int u = 0; u < ENTRIES_IN_FLIGHT; ++u) {
        rows[u] = slots[u] >= 0 ? load_packed<VEC>(vectors + slots[u] * static_cast<int64>(stride_of<T>(part.dim)) + d)
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
                const Lanes<VEC> row = widen<VEC>(rows[u], part.is_half);
#pragma unroll
                for (int i = 0; i < VEC; ++i) sum.v[i] += row.v[i] * weight;
            }
        }
    }
    if (part.mode == MEAN && last > first + 1) {
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
            const Lanes<VEC> row = widen<VEC>(rows[u], part.is_half);
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

// Say for the step where the gradients of a bag's entries lie, and their factors.
__device__ __forceinline__ void describe(const PoolPart& part, int64 first, int64 last, int64 place) {
    const float share = part.mode == MEAN ? static_cast<float>(last - first) : 1.0f;
    for (int64 e = first + lane_id() % part.team; e < last; e += part.team) {
        part.entry_offset[e] = part.mode == MAX ? ~place : place;
        if (part.entry_scale) part.entry_scale[e] = (part.mode == MAX ? 1.0f : weight_of(part, e)) / share;
    }
}

template <class T, int VEC>
__device__ __forceinline__ void pool_bags(const PoolPart& part, int64 first_sample, int count) {
    const int64* offsets = part.offsets + first_sample;
    for (int64 e = offsets[0] + lane_id(); e < offsets[count]; e += 32) part.ids.slots[e] = slot_of_entry(part.ids, e);
    __syncwarp();  // from here on lanes read slots that other lanes wrote
    for (int n = lane_id() / part.team; n < count; n += 32 / part.team) {
        const int64 first = offsets[n], last = offsets[n + 1];
        const int64 place = (first_sample + n) * part.width + part.col;
        describe(part, first, last, place);
        for (int d = lane_id() % part.team * VEC; d < part.dim; d += part.team * VEC) {
            const Lanes<VEC> pooled = part.mode == MAX ? max_bag<T, VEC>(part, first, last, d, part.argmax + place + d)
                                                       : sum_bag<T, VEC>(part, first, last, d);
            store_lanes<VEC>(part.out + place + d, pooled);
        }
    }
}

template <class T, int VEC>
__device__ __forceinline__ void pool_samples(const PoolPart& part, int64 first, int count) {
    if (part.offsets) {
        pool_bags<T, VEC>(part, first, count);
        return;
    }
    int slot = -1;
    if (lane_id() < count) {
        const int64 entry = part.first_entry + first + lane_id();
        slot = slot_of_entry(part.ids, entry);
        part.ids.slots[entry] = slot;
    }
    copy_rows<VEC>(
        static_cast<const T*>(part.vectors), part.is_half, slot, count, part.dim, part.team,
        part.out + first * part.width + part.col, part.width);
}

template <class T>
__device__ __forceinline__ void pool_parts(const PoolPart* parts, int64 num_parts, int64 num_tasks) {
    for (int64 task = warp_id(); task < num_tasks; task += num_warps()) {
        const PoolPart& part = part_of(parts, num_parts, task);
        const int64 first = (task - part.first_task) * 32;
        const int count = part.num_samples - first < 32 ? static_cast<int>(part.num_samples - first) : 32;
        if (part.vec == 4) pool_samples<T, 4>(part, first, count);
        else pool_samples<T, 1>(part, first, count);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
pool(const PoolPart* parts, int64 num_parts, int64 num_tasks) {
    pool_parts<float>(parts, num_parts, num_tasks);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
pool_narrow(const PoolPart* parts, int64 num_parts, int64 num_tasks) {
    pool_parts<uint16>(parts, num_parts, num_tasks);
}

// Row times gradient of each entry, summed as the CPU's kernel sums: 16 sums, added by halves.
template <class T, int VEC>
__device__ __forceinline__ void weigh_bags(
    const PoolPart& part, const float* gradient, float* out, int64 first, int count) {
    const int team = part.team, own = lane_id() % team;
    const uint32 mask = team_mask(team);
    for (int n = lane_id() / team; n < count; n += 32 / team) {
        const int64 begin = part.offsets[first + n], end = part.offsets[first + n + 1];
        const float* at = gradient + (first + n) * part.width + part.col;
        for (int64 e = begin; e < end; ++e) {
            const int slot = __ldg(part.ids.slots + e);
            Lanes<VEC> classes = zero_lanes<VEC>();
            for (int start = 0; start < part.dim; start += team * VEC) {
                const int d = start + own * VEC;
                Lanes<VEC> products = zero_lanes<VEC>();
                if (d < part.dim && slot >= 0) {
                    const T* vectors = static_cast<const T*>(part.vectors);
                    const T* row = vectors + slot * static_cast<int64>(stride_of<T>(part.dim));
                    products = widen<VEC>(load_packed<VEC>(row + d), part.is_half);
                    const Lanes<VEC> factors = load_constant<VEC>(at + d);
#pragma unroll
                    for (int i = 0; i < VEC; ++i) products.v[i] *= factors.v[i];
                }
                add_classes<VEC>(classes, products, team, mask);
            }
            const float sum = total<VEC>(classes, team, mask);
            if (own == 0) out[e] = part.mode == MEAN ? sum / static_cast<float>(end - begin) : sum;
        }
    }
}

// The parts' `out` is the gradient here, which is read, and `entry_scale` the weights' gradient, which is written.
template <class T>
__device__ __forceinline__ void weigh_parts(const PoolPart* parts, int64 num_parts, int64 num_tasks) {
    for (int64 task = warp_id(); task < num_tasks; task += num_warps()) {
        const PoolPart& part = part_of(parts, num_parts, task);
        const int64 first = (task - part.first_task) * 32;
        const int count = part.num_samples - first < 32 ? static_cast<int>(part.num_samples - first) : 32;
        if (part.vec == 4) weigh_bags<T, 4>(part, part.out, part.entry_scale, first, count);
        else weigh_bags<T, 1>(part, part.out, part.entry_scale, first, count);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
weight_gradient(const PoolPart* parts, int64 num_parts, int64 num_tasks) {
    weigh_parts<float>(parts, num_parts, num_tasks);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
weight_gradient_narrow(const PoolPart* parts, int64 num_parts, int64 num_tasks) {
    weigh_parts<uint16>(parts, num_parts, num_tasks);
}
