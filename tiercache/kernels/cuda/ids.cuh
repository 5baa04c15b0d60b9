// From local ids to slots. An id that is not in its table has slot -1.

#pragma once
#include "lanes.cuh"

__device__ __forceinline__ int slot_of_entry(
    const void* ids, int64 wide, int64 entry, const int* slot_of_id, int64 limit) {
    const int64 id = wide ? __ldg(static_cast<const int64*>(ids) + entry)
                          : static_cast<int64>(__ldg(static_cast<const int*>(ids) + entry));
    return static_cast<uint64>(id) < static_cast<uint64>(limit) ? __ldg(slot_of_id + id) : -1;
}
