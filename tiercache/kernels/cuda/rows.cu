// Copies of rows between slots and pieces at a pass switch. A piece is field-major: all its vectors, then all of each
// state, at a plain address: device memory, or pinned host memory that the device sees. Rows move as words of 4 bytes:
// vectors of 16 bits are not looked at.

#include "lanes.cuh"
#include "vectors.cuh"

struct Piece {
    int64 first_task;  // a task is 32 rows of one field
    float* data;
    int64 rows;
    int64 first;  // the place of its first row in moving order
};

struct Field {
    float* values;  // (S, width)
    int64 width;
    int64 before;  // floats of a row before this field
};

// Copy up to 32 adjacent rows to their slots: lane i holds the slot of row i.
template <int VEC>
__device__ __forceinline__ void scatter_rows(const float* from, int slot, int count, int width, int team, float* values) {
    const int teams = 32 / team, own = lane_id() % team, first = lane_id() / team;
    for (int turn = 0; turn < count; turn += teams * ROWS_IN_FLIGHT) {
        int64 to[ROWS_IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < ROWS_IN_FLIGHT; ++u) {
            const int row = turn + u * teams + first;
            const int taken = __shfl_sync(ALL_LANES, slot, row % 32);
            to[u] = row < count && taken >= 0 ? taken * static_cast<int64>(width) : -1;
        }
        for (int d = own * VEC; d < width; d += team * VEC) {
            Lanes<VEC> held[ROWS_IN_FLIGHT];
#pragma unroll
            for (int u = 0; u < ROWS_IN_FLIGHT; ++u) {
                const int64 row = turn + u * teams + first;
                if (to[u] >= 0) held[u] = load_constant<VEC>(from + row * width + d);
            }
#pragma unroll
            for (int u = 0; u < ROWS_IN_FLIGHT; ++u) {
                if (to[u] >= 0) store_lanes<VEC>(values + to[u] + d, held[u]);
            }
        }
    }
}

// The lanes of a row: a power of two, enough for `accesses` or all 32.
__device__ __forceinline__ int team_of(int accesses) { return accesses > 16 ? 32 : 1 << (32 - __clz(accesses - 1)); }

template <int VEC>
__device__ __forceinline__ void move_rows(const Field& field, float* at, int slot, int count, bool packing) {
    const int width = static_cast<int>(field.width), team = team_of((width + VEC - 1) / VEC);
    if (packing) copy_rows<VEC>(field.values, 0, slot, count, width, team, at, width);
    else scatter_rows<VEC>(at, slot, count, width, team, field.values);
}

// A piece's tasks: all of its first field, then all of the next. `order` may be null: the row at each place then has the
// slot at that place.
__device__ __forceinline__ void move_tasks(
    const Piece* pieces, int64 num_pieces, int64 num_tasks, const Field* fields, const int* slots, const int* order,
    bool packing) {
    for (int64 task = warp_id(); task < num_tasks; task += num_warps()) {
        const Piece& piece = part_of(pieces, num_pieces, task);
        const int64 chunks = (piece.rows + 31) / 32, turn = task - piece.first_task;
        const int64 number = turn / chunks, row = (turn - number * chunks) * 32;
        const Field& field = fields[number];
        const int count = piece.rows - row < 32 ? static_cast<int>(piece.rows - row) : 32;
        int slot = -1;
        if (lane_id() < count) {
            const int64 place = piece.first + row + lane_id();
            slot = __ldg(slots + (order ? __ldg(order + place) : place));
        }
        float* at = piece.data + field.before * piece.rows + row * field.width;
        const bool aligned =
            ((reinterpret_cast<uint64>(at) | reinterpret_cast<uint64>(field.values)) & 15) == 0 && field.width % 4 == 0;
        if (aligned) move_rows<4>(field, at, slot, count, packing);
        else move_rows<1>(field, at, slot, count, packing);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
pack(const Piece* pieces, int64 num_pieces, int64 num_tasks, const Field* fields, const int* slots, const int* order) {
    move_tasks(pieces, num_pieces, num_tasks, fields, slots, order, true);
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
unpack(const Piece* pieces, int64 num_pieces, int64 num_tasks, const Field* fields, const int* slots, const int* order) {
    move_tasks(pieces, num_pieces, num_tasks, fields, slots, order, false);
}
