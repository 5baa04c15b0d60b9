// What a step's entries are sorted by, for all groups at once, and the sorted entries of each group.
//
// A library sorts the keys of all groups in one call. The keys of a group are its slots, counted from the group's base,
// and `base + num_slots` for entries without a row, which come last in their group.

#include "lanes.cuh"

#define ENTRIES_OF_TASK 256

struct SortPart {  // one group
    int64 first_task;
    const int* slots;  // (size,)
    uint64* pairs;  // (size,): slot << 32 | entry, in the order of slots, those of one slot in batch order
    int64 size;
    int64 first;  // of the group's entries among those of all groups
    int64 base;
    int64 num_slots;
};

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
make_keys(const SortPart* parts, int64 num_parts, int64 num_tasks, int* keys) {
    for (int64 task = warp_id(); task < num_tasks; task += num_warps()) {
        const SortPart& part = part_of(parts, num_parts, task);
        const int64 start = (task - part.first_task) * ENTRIES_OF_TASK + lane_id();
        for (int64 i = start; i < part.size && i < start + ENTRIES_OF_TASK; i += 32) {
            const uint32 slot = static_cast<uint32>(__ldg(part.slots + i));
            const int64 kept = slot < static_cast<uint64>(part.num_slots) ? slot : part.num_slots;
            keys[part.first + i] = static_cast<int>(part.base + kept);
        }
    }
}

// keys and order of all groups as the sort returned them.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
make_pairs(const SortPart* parts, int64 num_parts, int64 num_tasks, const int* keys, const int64* order) {
    for (int64 task = warp_id(); task < num_tasks; task += num_warps()) {
        const SortPart& part = part_of(parts, num_parts, task);
        const int64 start = (task - part.first_task) * ENTRIES_OF_TASK + lane_id();
        for (int64 i = start; i < part.size && i < start + ENTRIES_OF_TASK; i += 32) {
            const uint64 slot = static_cast<uint64>(__ldg(keys + part.first + i) - part.base);
            part.pairs[i] = slot << 32 | static_cast<uint64>(__ldg(order + part.first + i) - part.first);
        }
    }
}
