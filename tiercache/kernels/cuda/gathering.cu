// Lookup without arithmetic: from local ids to slots, from slots to rows. Slot -1 reads as zeros.

#include "ids.cuh"
#include "lanes.cuh"
#include "vectors.cuh"

struct GatherPart {  // one feature
    int64 first_task;  // a task is 32 entries
    const void* vectors;  // (S, dim) float32, or 16-bit numbers
    const void* ids;  // (entries,); null: slots are given
    const int* slot_of_id;
    int* slots;  // (entries,), written if there are ids
    float* out;  // (entries, dim), or null
    int64 limit;  // of ids
    int64 entries;
    int wide;  // ids are int64
    int dim;
    int vec;  // elements of one access: 4 or 1
    int team;  // lanes of one row
    int is_half;
};

template <class T>
__device__ __forceinline__ void gather_parts(const Parts<GatherPart>& parts) {
    for (int64 task = warp_id(); task < parts.num_tasks; task += num_warps()) {
        const GatherPart& part = part_of(parts, task);
        const int64 first = (task - part.first_task) * 32;
        const int count = part.entries - first < 32 ? static_cast<int>(part.entries - first) : 32;
        int slot = -1;
        if (lane_id() < count) {
            const int64 entry = first + lane_id();
            if (part.ids) slot = part.slots[entry] = slot_of_entry(part.ids, part.wide, entry, part.slot_of_id, part.limit);
            else slot = __ldg(part.slots + entry);
        }
        if (!part.out) continue;
        float* to = part.out + first * part.dim;
        const T* vectors = static_cast<const T*>(part.vectors);
        const int is_half = part.is_half, dim = part.dim, team = part.team;
        if (part.vec == 4) copy_rows<4>(vectors, is_half, slot, count, dim, team, to, dim);
        else copy_rows<1>(vectors, is_half, slot, count, dim, team, to, dim);
    }
}

// Four blocks on an SM.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 4)
gather(const __grid_constant__ Parts<GatherPart> parts) {
    gather_parts<float>(parts);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 4)
gather_narrow(const __grid_constant__ Parts<GatherPart> parts) {
    gather_parts<uint16>(parts);
}
