// From raw keys to positions: an open-addressing index. See key_index.py for the layout of a place.
//
// Places are in buckets of four, 64 bytes: one memory access. A key's search begins with the first place
// of its bucket and ends at the first empty place. A thread takes a place by one compare-and-swap of its key; as keys
// are never removed, a thread that fails continues with the next place. The order of threads changes no answer.

#include "hash.cuh"
#include "lanes.cuh"

#define EMPTY 0x8000000000000000ull
#define NOWHERE 0xFFFFFFFFull
#define BUCKET 4
#define KEYS_OF_TASK 256

struct InsertPart {
    int64 first_task;  // a task is 256 keys
    const int64* keys;  // (n,)
    int64 first_position;  // of the first key; the others follow
    int64 size;
    int64 table;
    uint64 table_id;
};

struct FindPart {
    int64 first_task;  // a task is 256 entries
    int64 first;
    int64 last;
    int64 table;
    uint64 table_id;
};

__device__ __forceinline__ uint64 bucket_of(int64 key, uint64 table_id, int64 capacity) {
    return hash_of(key, table_id) & static_cast<uint64>(capacity / BUCKET - 1);
}

// places (capacity,), apart (tables,).
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
clear(ulonglong2* places, int64 capacity, uint64* apart, int64 tables) {
    const int64 threads = 32 * num_warps();
    ulonglong2 empty;
    empty.x = EMPTY, empty.y = NOWHERE;
    for (int64 i = blockIdx.x * static_cast<int64>(blockDim.x) + threadIdx.x; i < capacity || i < tables; i += threads) {
        if (i < capacity) places[i] = empty;
        if (i < tables) apart[i] = NOWHERE;
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) forget_missing(uint64* missing) {
    if (blockIdx.x == 0 && threadIdx.x == 0) missing[0] = 0, missing[1] = ~0ull;
}

__device__ __forceinline__ void take_place(
    int64 key, uint64 word, uint64 table_id, uint64* places, int64 capacity) {
    uint64 place = bucket_of(key, table_id, capacity) * BUCKET;
    for (;; place = (place + 1) & static_cast<uint64>(capacity - 1)) {
        uint64* at = places + 2 * place;
        if (__ldcg(at) == EMPTY && atomicCAS(at, EMPTY, static_cast<uint64>(key)) == EMPTY) {
            at[1] = word;
            return;
        }
    }
}

// Insert every key; keys must be unique.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) insert(
    const __grid_constant__ Parts<InsertPart> parts, uint64* places, int64 capacity, uint64* apart) {
    for (int64 task = warp_id(); task < parts.num_tasks; task += num_warps()) {
        const InsertPart& part = part_of(parts, task);
        const int64 begin = (task - part.first_task) * KEYS_OF_TASK + lane_id();
        for (int turn = 0; turn < KEYS_OF_TASK; turn += 32) {
            const int64 i = begin + turn;
            if (i >= part.size) break;
            const int64 key = __ldg(part.keys + i);
            const int64 position = part.first_position + i;
            const uint64 word = static_cast<uint64>(part.table) << 32 | static_cast<uint32>(position);
            if (static_cast<uint64>(key) == EMPTY) {
                apart[part.table] = static_cast<uint64>(position);
            } else {
                take_place(key, word, part.table_id, places, capacity);
            }
        }
    }
}

__device__ __forceinline__ int position_of(
    int64 key, const FindPart& part, const ulonglong2* places, int64 capacity, const uint64* apart) {
    if (static_cast<uint64>(key) == EMPTY) return static_cast<int>(static_cast<uint32>(__ldg(apart + part.table)));
    const uint64 last = static_cast<uint64>(capacity / BUCKET - 1);
    for (uint64 bucket = bucket_of(key, part.table_id, capacity);; bucket = (bucket + 1) & last) {
        ulonglong2 held[BUCKET];
#pragma unroll
        for (int i = 0; i < BUCKET; ++i) held[i] = __ldg(places + bucket * BUCKET + i);
#pragma unroll
        for (int i = 0; i < BUCKET; ++i) {
            if (held[i].x == EMPTY) return -1;
            if (held[i].x == static_cast<uint64>(key) && held[i].y >> 32 == static_cast<uint64>(part.table)) {
                return static_cast<int>(static_cast<uint32>(held[i].y));
            }
        }
    }
}

// missing (2,), or null: how many keys are missing so far, and the least such entry.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) find(
    const __grid_constant__ Parts<FindPart> parts, const int64* keys, const ulonglong2* places, int64 capacity,
    const uint64* apart, int* positions, uint64* missing) {
    for (int64 task = warp_id(); task < parts.num_tasks; task += num_warps()) {
        const FindPart& part = part_of(parts, task);
        const int64 begin = part.first + (task - part.first_task) * KEYS_OF_TASK;
        for (int turn = 0; turn < KEYS_OF_TASK; turn += 32) {
            const int64 entry = begin + turn + lane_id();
            bool missed = false;
            if (entry < part.last) {
                const int position = position_of(__ldg(keys + entry), part, places, capacity, apart);
                positions[entry] = position;
                missed = position < 0;
            }
            const uint32 lanes = __ballot_sync(ALL_LANES, missed);
            if (lanes && missing && lane_id() == 0) {
                atomicAdd(missing, static_cast<uint64>(__popc(lanes)));
                atomicMin(missing + 1, static_cast<uint64>(begin + turn + __ffs(lanes) - 1));
            }
        }
    }
}
