// From local ids to slots. An id that is not in its table has slot -1, and the smallest such entry is kept.

#pragma once
#include "lanes.cuh"

struct Ids {
    const void* ids;  // (E,)
    const int* slot_of_local;  // (L,), or null: the local position itself
    int* slots;  // (E,), written
    uint64* bad;  // the smallest entry with a bad id, all bits set where there is none; or null
    int64 base;  // where the feature's table begins among the local positions
    int64 limit;  // its number of keys
    int64 wide;  // ids are int64
};

__device__ __forceinline__ int slot_of_entry(const Ids& part, int64 entry) {
    const int64 id = part.wide ? __ldg(static_cast<const int64*>(part.ids) + entry)
                               : static_cast<int64>(__ldg(static_cast<const int*>(part.ids) + entry));
    if (static_cast<uint64>(id) < static_cast<uint64>(part.limit)) {
        const int64 local = part.base + id;
        return part.slot_of_local ? __ldg(part.slot_of_local + local) : static_cast<int>(local);
    }
    if (part.bad) atomicMin(part.bad, static_cast<uint64>(entry));
    return -1;
}
