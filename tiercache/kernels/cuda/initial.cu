// Initial rows: a row depends on table, seed and key only, so it can be made on any device, in any order.

#include "lanes.cuh"
#include "philox.cuh"
#include "vectors.cuh"

#define ZEROS 0
#define CONSTANT 1
#define UNIFORM 2

struct NewRows {
    int64 first_task;  // a task is 32 rows
    const int64* keys;  // (rows,); null if no key is needed
    const int* slots;  // (rows,), -1 is skipped; or null: row i goes to place i
    void* out;  // (S, dim) float32, or 16-bit numbers
    int64 rows;
    uint64 stream;
    int dim;
    int vec;  // elements of one access: 4 or 1
    int kind;
    float a;  // the constant or the low end
    float b;  // the span
    int is_half;
};

__device__ __forceinline__ Lanes<4> elements_of(const NewRows& part, int64 row, int block) {
    Lanes<4> lanes = zero_lanes<4>();
    if (part.kind == CONSTANT) {
#pragma unroll
        for (int i = 0; i < 4; ++i) lanes.v[i] = part.a;
    } else if (part.kind == UNIFORM) {
        const Words words = words_of_row(__ldg(part.keys + row), static_cast<uint32>(block), part.stream);
#pragma unroll
        for (int i = 0; i < 4; ++i) lanes.v[i] = part.a + unit_of(words.w[i]) * part.b;
    }
    return lanes;
}

__device__ __forceinline__ void write_elements(
    const NewRows& part, float* to, const Lanes<4>& lanes, int count) {
    if (part.vec == 4) {
        store_lanes<4>(to, lanes);
    } else {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j < count) to[j] = lanes.v[j];
        }
    }
}

// Rounded to the nearest, in words: padding after the last element of a row is zero.
__device__ __forceinline__ void write_elements(
    const NewRows& part, uint16* to, const Lanes<4>& lanes, int count) {
    uint32 words[2];
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
        const uint32 lower = round_to_nearest(lanes.v[j], part.is_half);
        words[j / 2] = lower | (j + 1 < count ? round_to_nearest(lanes.v[j + 1], part.is_half) << 16 : 0u);
    }
    uint32* at = reinterpret_cast<uint32*>(to);
    if (part.vec == 4) {
        __stcg(reinterpret_cast<uint2*>(at), make_uint2(words[0], words[1]));
    } else {
        at[0] = words[0];
        if (count > 2) at[1] = words[1];
    }
}

// Four elements make one run of the generator and one access; a warp's lanes take them side by side.
template <class T>
__device__ __forceinline__ void make_rows(const Parts<NewRows>& parts) {
    for (int64 task = warp_id(); task < parts.num_tasks; task += num_warps()) {
        const NewRows& part = part_of(parts, task);
        const int64 first = (task - part.first_task) * 32;
        const int count = part.rows - first < 32 ? static_cast<int>(part.rows - first) : 32;
        const int blocks = (part.dim + 3) / 4;
        for (int i = lane_id(); i < count * blocks; i += 32) {
            const int row = i / blocks, block = i - row * blocks;
            const int64 slot = part.slots ? __ldg(part.slots + first + row) : first + row;
            if (slot < 0) continue;
            const Lanes<4> lanes = elements_of(part, first + row, block);
            T* to = static_cast<T*>(part.out) + slot * stride_of<T>(part.dim) + 4 * block;
            write_elements(part, to, lanes, part.dim - 4 * block);
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
initial_rows(const __grid_constant__ Parts<NewRows> parts) {
    make_rows<float>(parts);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
initial_rows_narrow(const __grid_constant__ Parts<NewRows> parts) {
    make_rows<uint16>(parts);
}

// The stream of a row, from which the step's kernels draw random bits for stochastic rounding.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
set_streams(uint64* streams, const int* slots, const int64* keys, int64 count, int64 table) {
    const int64 threads = 32 * num_warps();
    for (int64 i = blockIdx.x * static_cast<int64>(blockDim.x) + threadIdx.x; i < count; i += threads) {
        const int64 slot = slots ? __ldg(slots + i) : i;
        if (slot >= 0) streams[slot] = static_cast<uint64>(__ldg(keys + i)) ^ static_cast<uint64>(table);
    }
}
