// Lookup without arithmetic: from slots to rows. Slot -1 reads as zeros.

#include "lanes.cuh"

struct GatherPart {
    int64 first_task;  // a task is 32 entries
    const float* vectors;  // (S, dim)
    const int* slots;  // (entries,)
    float* out;  // (entries, dim)
    int64 entries;
    int dim;
    int vec;  // elements of one access: 4 or 1
    int team;  // lanes of one row
    int unused;
};
static_assert(sizeof(GatherPart) == 56, "as GATHER_PART in cuda_gathering.py");

#define ROWS_IN_FLIGHT 4

// Copy the rows of a warp's 32 entries; lane e holds the slot of entry `first` + e, -1 behind the last.
template <int VEC> __device__ __forceinline__ void copy_rows(const GatherPart& part, int64 first, int slot) {
    const int team = part.team, teams = 32 / team, dim = part.dim;
    const int own = lane_id() % team, row = lane_id() / team;
    const int count = part.entries - first < 32 ? static_cast<int>(part.entries - first) : 32;
    for (int turn = 0; turn < count; turn += teams * ROWS_IN_FLIGHT) {
        int64 from[ROWS_IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < ROWS_IN_FLIGHT; ++u) {
            const int entry = turn + u * teams + row;
            from[u] = static_cast<int64>(__shfl_sync(ALL_LANES, slot, entry % 32)) * dim;
        }
        for (int d = own * VEC; d < dim; d += team * VEC) {
            Lanes<VEC> held[ROWS_IN_FLIGHT];
#pragma unroll
            for (int u = 0; u < ROWS_IN_FLIGHT; ++u) {
                const bool given = turn + u * teams + row < count && from[u] >= 0;
                held[u] = given ? load_constant<VEC>(part.vectors + from[u] + d) : zero_lanes<VEC>();
            }
#pragma unroll
            for (int u = 0; u < ROWS_IN_FLIGHT; ++u) {
                const int entry = turn + u * teams + row;
                if (entry < count) store_lanes<VEC>(part.out + (first + entry) * dim + d, held[u]);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
gather(const GatherPart* parts, int64 num_parts, int64 num_tasks) {
    for (int64 task = warp_id(); task < num_tasks; task += num_warps()) {
        const GatherPart& part = part_of(parts, num_parts, task);
        const int64 first = (task - part.first_task) * 32;
        const int slot = first + lane_id() < part.entries ? part.slots[first + lane_id()] : -1;
        if (part.vec == 4) copy_rows<4>(part, first, slot);
        else copy_rows<1>(part, first, slot);
    }
}
