// Sorts a step's entries by slot, in batch order within a slot, and finds the start of each slot's run.
//
// A library sorts the keys of all groups in one call. The keys of a group are its slots, counted from the group's base,
// and `base + num_slots` for entries without a row, which come last in their group. Then warps count the runs that
// begin in their tile of the sorted keys, and each writes its own after the runs of the previous tiles.

#include "lanes.cuh"

#define ENTRIES_OF_TASK 256
#define STRETCH 64  // as in update.cu

struct KeyPart {  // entries of a group whose slots are contiguous
    int64 first_task;
    const int* slots;  // (size,)
    int64 size;
    int64 first;  // of these entries within all groups
    int64 base;
    int64 num_slots;
};

struct RunPart {  // one group
    int64 first_task;
    uint32* entries;  // (size,): the entry at each place of the order
    uint64* runs;  // (size + 1,): slot << 32 | first place of each run; after the last one, the number of places
    uint32* counts;  // (tasks,): the runs that begin in each tile
    uint32* run_at;  // (stretches + 1,): the run of the first place of each stretch; at its end the number of runs
    int64 size;
    int64 first;
    int64 base;
    int64 tile;  // places, a multiple of 32
    int64 num_tiles;
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
make_keys(const __grid_constant__ Parts<KeyPart> parts, int* keys) {
    for (int64 task = warp_id(); task < parts.num_tasks; task += num_warps()) {
        const KeyPart& part = part_of(parts, task);
        const int64 start = (task - part.first_task) * ENTRIES_OF_TASK + lane_id();
        for (int64 i = start; i < part.size && i < start + ENTRIES_OF_TASK; i += 32) {
            const uint32 slot = static_cast<uint32>(__ldg(part.slots + i));
            const int64 kept = slot < static_cast<uint64>(part.num_slots) ? slot : part.num_slots;
            keys[part.first + i] = static_cast<int>(part.base + kept);
        }
    }
}

// A mask of the 32 places from `from` on: 1 if a run begins there.
__device__ __forceinline__ uint32 begins_among(const RunPart& part, const int* keys, int64 from) {
    const int64 own = from + lane_id();
    const int* key = keys + part.first + own;
    return __ballot_sync(ALL_LANES, own < part.size && (own == 0 || __ldg(key) != __ldg(key - 1)));
}

// keys as the sort returned them. A task is a tile.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
count_runs(const __grid_constant__ Parts<RunPart> parts, const int* keys) {
    for (int64 task = warp_id(); task < parts.num_tasks; task += num_warps()) {
        const RunPart& part = part_of(parts, task);
        const int64 tile = task - part.first_task;
        uint32 count = 0;
        for (int64 from = tile * part.tile; from < (tile + 1) * part.tile && from < part.size; from += 32) {
            count += __popc(begins_among(part, keys, from));
        }
        if (lane_id() == 0) part.counts[tile] = count;
    }
}

// keys and order of all groups as the sort returned them.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
write_runs(const __grid_constant__ Parts<RunPart> parts, const int* keys, const int64* order) {
    for (int64 task = warp_id(); task < parts.num_tasks; task += num_warps()) {
        const RunPart& part = part_of(parts, task);
        const int64 tile = task - part.first_task;
        uint32 before = 0;
        for (int64 i = lane_id(); i < tile; i += 32) before += __ldg(part.counts + i);
        for (int half = 16; half > 0; half /= 2) before += __shfl_xor_sync(ALL_LANES, before, half);
        for (int64 from = tile * part.tile; from < (tile + 1) * part.tile && from < part.size; from += 32) {
            const int64 own = from + lane_id();
            const uint32 begins = begins_among(part, keys, from);
            const uint32 mine = 1u << lane_id();
            const uint32 number = before + __popc(begins & (mine - 1u));  // of a run that begins here
            if (begins & mine) {
                const uint64 slot = static_cast<uint64>(__ldg(keys + part.first + own) - part.base);
                part.runs[number] = slot << 32 | static_cast<uint64>(own);
            }
            if (own < part.size) {
                part.entries[own] = static_cast<uint32>(__ldg(order + part.first + own) - part.first);
                if (own % STRETCH == 0) part.run_at[own / STRETCH] = begins & mine ? number : number - 1u;
            }
            before += __popc(begins);
        }
        if (tile == part.num_tiles - 1 && lane_id() == 0) {
            part.runs[before] = static_cast<uint64>(part.size);
            part.run_at[(part.size + STRETCH - 1) / STRETCH] = before;
        }
    }
}
