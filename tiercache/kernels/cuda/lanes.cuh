// Shared by all kernels: types, the part of a launch a warp works at, rows in accesses of 16 bytes, sums over lanes.
//
// A launch does the work of several tables, which may have different dims: an array of parts describes them. Work is
// cut into tasks of one warp; part p has the tasks from parts[p].first_task up to the next part's. The lanes of a warp
// work in teams: a team is a power of two of lanes, enough to hold one row or all 32, and takes one row at a time.
// A lane of a team holds VEC neighboring elements: 4, in one access of 16 bytes, if dim and addresses allow it, or 1.
//
// Parts that change from step to step are an argument of the launch: constant memory, which no store can have changed.
// Other tables of parts are in global memory.
//
// Kernels take int64, float, pointers and `Parts` only, and use no library. They are compiled without fused
// multiply-add, so that their bits equal those of the CPU's kernels if the order of additions is the same.

#pragma once

typedef long long int64;
typedef unsigned long long uint64;
typedef unsigned int uint32;

#define ALL_LANES 0xFFFFFFFFu
#define BLOCK_THREADS 256

template <int VEC> struct Lanes {
    float v[VEC];
};

template <int VEC> __device__ __forceinline__ Lanes<VEC> zero_lanes() {
    Lanes<VEC> lanes;
#pragma unroll
    for (int i = 0; i < VEC; ++i) lanes.v[i] = 0.0f;
    return lanes;
}

// For rows that this kernel does not write: through the read-only cache.
template <int VEC> __device__ __forceinline__ Lanes<VEC> load_constant(const float* from) {
    Lanes<VEC> lanes;
    if constexpr (VEC == 4) {
        const float4 four = __ldg(reinterpret_cast<const float4*>(from));
        lanes.v[0] = four.x, lanes.v[1] = four.y, lanes.v[2] = four.z, lanes.v[3] = four.w;
    } else {
        lanes.v[0] = __ldg(from);
    }
    return lanes;
}

// For columns of an output or a gradient, which the model lays out: four elements in one access only if aligned.
template <int VEC> __device__ __forceinline__ Lanes<VEC> load_anywhere(const float* from) {
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

// For rows that this kernel writes: they are used once, so the first-level cache is bypassed. (Pointers of a part are
// generic addresses for the compiler; these say that they are global memory.)
template <int VEC> __device__ __forceinline__ Lanes<VEC> load_lanes(const float* from) {
    Lanes<VEC> lanes;
    if constexpr (VEC == 4) {
        const float4 four = __ldcg(reinterpret_cast<const float4*>(from));
        lanes.v[0] = four.x, lanes.v[1] = four.y, lanes.v[2] = four.z, lanes.v[3] = four.w;
    } else {
        lanes.v[0] = __ldcg(from);
    }
    return lanes;
}

template <int VEC> __device__ __forceinline__ void store_lanes(float* to, const Lanes<VEC>& lanes) {
    if constexpr (VEC == 4) {
        __stcg(reinterpret_cast<float4*>(to), make_float4(lanes.v[0], lanes.v[1], lanes.v[2], lanes.v[3]));
    } else {
        __stcg(to, lanes.v[0]);
    }
}

// As load_anywhere.
template <int VEC> __device__ __forceinline__ void store_anywhere(float* to, const Lanes<VEC>& lanes) {
    if constexpr (VEC == 4) {
        if (reinterpret_cast<uint64>(to) % 16 != 0) {
#pragma unroll
            for (int k = 0; k < 4; ++k) __stcg(to + k, lanes.v[k]);
            return;
        }
    }
    store_lanes<VEC>(to, lanes);
}

// Prefetch to the second-level cache.
__device__ __forceinline__ void prefetch(const float* from) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.global.L2 [%0];" ::"l"(from));
#endif
}

// The sum of all elements that a team holds, as simd.total on the CPU adds: element d goes to sum d % 16, and the
// sixteen sums are added by halves. `classes` holds the sums of this lane's elements so far, in order of d.
template <int VEC>
__device__ __forceinline__ void add_classes(Lanes<VEC>& classes, const Lanes<VEC>& values, int team, uint32 mask) {
    const int period = team < 16 / VEC ? team : 16 / VEC;  // lanes of a team that hold sixteen elements
    const int own = threadIdx.x % period;
    for (int from = own; from < team; from += period) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) classes.v[i] += __shfl_sync(mask, values.v[i], from, team);
    }
}

template <int VEC> __device__ __forceinline__ float total(const Lanes<VEC>& classes, int team, uint32 mask) {
    const int period = team < 16 / VEC ? team : 16 / VEC;
    Lanes<VEC> sums = classes;
    for (int half = period / 2; half > 0; half /= 2) {
#pragma unroll
        for (int i = 0; i < VEC; ++i) sums.v[i] += __shfl_xor_sync(mask, sums.v[i], half, team);
    }
    if constexpr (VEC == 4) return (sums.v[0] + sums.v[2]) + (sums.v[1] + sums.v[3]);
    return sums.v[0];
}

__device__ __forceinline__ int lane_id() { return threadIdx.x % 32; }

__device__ __forceinline__ int64 warp_id() { return (blockIdx.x * static_cast<int64>(blockDim.x) + threadIdx.x) / 32; }

__device__ __forceinline__ int64 num_warps() { return static_cast<int64>(gridDim.x) * blockDim.x / 32; }

// The lanes of this lane's team, as a mask of the warp.
__device__ __forceinline__ uint32 team_mask(int team) {
    return team == 32 ? ALL_LANES : ((1u << team) - 1u) << (lane_id() / team * team);
}

// The last part whose first task is not after `task`; parts without tasks are skipped.
template <class PART> __device__ __forceinline__ const PART& part_of(const PART* parts, int64 num_parts, int64 task) {
    int64 low = 0, high = num_parts;
    while (high - low > 1) {
        const int64 middle = (low + high) / 2;
        if (parts[middle].first_task <= task) low = middle;
        else high = middle;
    }
    return parts[low];
}

#define PART_BYTES 4000  // a launch takes 4,096 bytes of arguments

template <class PART> struct Parts {
    int64 num_parts;
    int64 num_tasks;
    PART parts[PART_BYTES / sizeof(PART)];
};

template <class PART> __device__ __forceinline__ const PART& part_of(const Parts<PART>& parts, int64 task) {
    return part_of(parts.parts, parts.num_parts, task);
}
