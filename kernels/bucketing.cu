// Entries of a batch by the rank that owns their row. The order is the sort's of sorting.cu, with owners for slots.

#include "ids.cuh"
#include "lanes.cuh"
#include "owners.cuh"

struct OwnerPart {
    int64 first_task;  // a task is 256 entries
    const int64* keys;  // (E,), or null: owners by local id
    Ids ids;  // its slot_of_local and slots are null
    const short* owner_of_local;  // (L,)
    int* owners;  // (E,), or null
    short* short_owners;  // (E,), or null
    uint64 table_id;
    int64 num_owners;
    int64 first;
    int64 last;
};
static_assert(sizeof(OwnerPart) == 128, "as OWNER_PART in cuda_bucketing.py");

#define ENTRIES_OF_TASK 256

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
find_owners(const OwnerPart* parts, int64 num_parts, int64 num_tasks) {
    for (int64 task = warp_id(); task < num_tasks; task += num_warps()) {
        const OwnerPart& part = part_of(parts, num_parts, task);
        const int64 begin = part.first + (task - part.first_task) * ENTRIES_OF_TASK + lane_id();
#pragma unroll
        for (int i = 0; i < ENTRIES_OF_TASK; i += 32) {
            const int64 entry = begin + i;
            if (entry >= part.last) continue;
            int owner;
            if (part.keys) {
                owner = owner_of(hash_of(__ldg(part.keys + entry), part.table_id), part.num_owners);
            } else {
                const int local = slot_of_entry(part.ids, entry);
                owner = local < 0 ? -1 : __ldg(part.owner_of_local + local);
            }
            if (part.owners) part.owners[entry] = owner;
            if (part.short_owners) part.short_owners[entry] = static_cast<short>(owner);
        }
    }
}

// pairs (E,): owner << 32 | entry, sorted. Each thread that is the first of an owner writes where that owner begins, and
// those before it without entries; the thread behind the last pair writes the rest.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
place_entries(const uint64* pairs, int64 size, int64 num_owners, int* order, int* place, int64* starts) {
    const int64 threads = 32 * num_warps();
    for (int64 i = blockIdx.x * static_cast<int64>(blockDim.x) + threadIdx.x; i <= size; i += threads) {
        const uint64 pair = i < size ? __ldg(pairs + i) : 0;
        if (i < size) {
            const int entry = static_cast<int>(pair & 0xFFFFFFFFull);
            order[i] = entry;
            place[entry] = static_cast<int>(i);
        }
        const int64 before = i > 0 ? static_cast<int64>(__ldg(pairs + i - 1) >> 32) : -1;
        const int64 here = i < size ? static_cast<int64>(pair >> 32) : num_owners;
        for (int64 owner = before + 1; owner <= here; ++owner) starts[owner] = i;
    }
}
