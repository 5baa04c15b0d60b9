// Lookup without arithmetic: from local ids to slots, from slots to rows. Slot -1 reads as zeros.

#include "ids.cuh"
#include "lanes.cuh"
#include "vectors.cuh"

struct GatherPart {
    int64 first_task;  // a task is 32 entries
    const void* vectors;  // (S, dim) float32, or 16-bit numbers
    const int* slots;  // (entries,)
    float* out;  // (entries, dim)
    int64 entries;
    int dim;
    int vec;  // elements of one access: 4 or 1
    int team;  // lanes of one row
    int is_half;
};

struct MapPart {  // one feature
    int64 first_task;  // a task is 256 entries
    const void* ids;  // (E,)
    const int* slot_of_local;  // (L,)
    int* slots;  // (E,), written
    int64 base;  // where the feature's table begins among the local positions
    int64 limit;  // its number of keys
    int64 wide;  // ids are int64
    int64 first;
    int64 last;
};

#define ENTRIES_OF_MAP_TASK 256

template <class T>
__device__ __forceinline__ void gather_parts(const Parts<GatherPart>& parts) {
    for (int64 task = warp_id(); task < parts.num_tasks; task += num_warps()) {
        const GatherPart& part = part_of(parts, task);
        const int64 first = (task - part.first_task) * 32;
        const int count = part.entries - first < 32 ? static_cast<int>(part.entries - first) : 32;
        const int slot = lane_id() < count ? __ldg(part.slots + first + lane_id()) : -1;
        float* to = part.out + first * part.dim;
        const T* vectors = static_cast<const T*>(part.vectors);
        const int is_half = part.is_half, dim = part.dim, team = part.team;
        if (part.vec == 4) copy_rows<4>(vectors, is_half, slot, count, dim, team, to, dim);
        else copy_rows<1>(vectors, is_half, slot, count, dim, team, to, dim);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
gather(const __grid_constant__ Parts<GatherPart> parts) {
    gather_parts<float>(parts);
}

// Four blocks on an SM, as without being told for float32.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 4)
gather_narrow(const __grid_constant__ Parts<GatherPart> parts) {
    gather_parts<uint16>(parts);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
map_slots(const __grid_constant__ Parts<MapPart> parts) {
    for (int64 task = warp_id(); task < parts.num_tasks; task += num_warps()) {
        const MapPart& part = part_of(parts, task);
        const int64 first = part.first + (task - part.first_task) * ENTRIES_OF_MAP_TASK + lane_id();
#pragma unroll
        for (int i = 0; i < ENTRIES_OF_MAP_TASK; i += 32) {
            if (first + i >= part.last) continue;
            const int* slot_of_id = part.slot_of_local + part.base;
            part.slots[first + i] = slot_of_entry(part.ids, part.wide, first + i, slot_of_id, part.limit);
        }
    }
}
