// From local ids to slots. An id that is not in its table has slot -1.

#pragma once
#include "lanes.cuh"

struct Ids {
    const void* ids;  // (E,)
    const int* slot_of_local;  // (L,)
    int* slots;  // (E,), written
    int64 base;  // where the feature's table begins among the local positions
    int64 limit;  // its number of keys
    int64 wide;  // ids are int64
};

__device__ __forceinline__ int slot_of_entry(const Ids& part, int64 entry) {
    const int64 id = part.wide ? __ldg(static_cast<const int64*>(part.ids) + entry)
                               : static_cast<int64>(__ldg(static_cast<const int*>(part.ids) + entry));
    if (static_cast<uint64>(id) < static_cast<uint64>(part.limit)) {
        return __ldg(part.slot_of_local + part.base + id);
    }
    return -1;
}
