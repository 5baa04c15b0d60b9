// Bring the entries of a step that touch one row together, in batch order: a stable radix sort of (slot << 32 | entry).
//
// Least significant digit first, 8 bits at most. For each digit: every tile of 4096 pairs counts its digits; the counts
// are summed over the tiles, digit by digit; every tile then moves its pairs, in order. A pair's place depends on the
// input alone, not on blocks or their order.

#include "lanes.cuh"

#define DIGITS 256
#define WARPS (BLOCK_THREADS / 32)
#define TURNS 16
#define TILE (BLOCK_THREADS * TURNS)

// An entry without a row comes behind all others.
__device__ __forceinline__ uint64 pair_of(const int* slots, int64 entry, int64 num_slots) {
    const uint64 slot = static_cast<uint32>(__ldg(slots + entry));
    return (slot < static_cast<uint64>(num_slots) ? slot : static_cast<uint64>(num_slots)) << 32 | entry;
}

// `slots` in the first turn, where pairs are still to be made; `pairs` later. counts is (DIGITS, tiles).
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) count_digits(
    const int* slots, const uint64* pairs, int64 size, int64 num_slots, int64 shift, int64 mask, uint32* counts) {
    __shared__ uint32 found[DIGITS];
    const int64 tiles = (size + TILE - 1) / TILE;
    for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        found[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int64 i = tile * TILE + turn * BLOCK_THREADS + threadIdx.x;
            if (i < size) {
                const uint64 pair = slots ? pair_of(slots, i, num_slots) : __ldg(pairs + i);
                atomicAdd(&found[pair >> shift & mask], 1u);
            }
        }
        __syncthreads();
        counts[threadIdx.x * tiles + tile] = found[threadIdx.x];
    }
}

// The sum of `value` over the lanes before this one; `whole` becomes the sum over all.
__device__ __forceinline__ uint32 sum_before(uint32 value, uint32& whole) {
    uint32 sum = value;
#pragma unroll
    for (int delta = 1; delta < 32; delta *= 2) {
        const uint32 below = __shfl_up_sync(ALL_LANES, sum, delta);
        if (lane_id() >= delta) sum += below;
    }
    whole = __shfl_sync(ALL_LANES, sum, 31);
    return sum - value;
}

// A warp for each digit: counts become the sum over the tiles before, totals[digit] that over all.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) sum_tiles(uint32* counts, int64 tiles, uint32* totals) {
    for (int64 digit = warp_id(); digit < DIGITS; digit += num_warps()) {
        uint32* row = counts + digit * tiles;
        uint32 before = 0;
        for (int64 first = 0; first < tiles; first += 32) {
            const int64 tile = first + lane_id();
            uint32 whole;
            const uint32 sum = sum_before(tile < tiles ? row[tile] : 0u, whole);
            if (tile < tiles) row[tile] = before + sum;
            before += whole;
        }
        if (lane_id() == 0) totals[digit] = before;
    }
}

// The sum of `value` over the threads of the block before this one. All threads call it, `of_warps` is shared:
// there is a barrier between two calls.
__device__ __forceinline__ uint32 sum_before_in_block(uint32 value, uint32* of_warps) {
    uint32 whole;
    uint32 sum = sum_before(value, whole);
    if (lane_id() == 0) of_warps[threadIdx.x / 32] = whole;
    __syncthreads();
    for (int warp = 0; warp < static_cast<int>(threadIdx.x) / 32; ++warp) sum += of_warps[warp];
    return sum;
}

// counts and totals as sum_tiles left them. Each warp has 512 neighbouring pairs, 32 in each turn.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) move_pairs(
    const int* slots, const uint64* pairs, int64 size, int64 num_slots, int64 shift, int64 mask, const uint32* counts,
    const uint32* totals, uint64* moved) {
    __shared__ uint64 staged[TILE];
    __shared__ uint32 of_warp[WARPS][DIGITS];  // a digit's pairs: counted, then the sum over the warps before
    __shared__ uint32 in_tile[DIGITS];  // where a digit's pairs begin in `staged`
    __shared__ int64 shift_of[DIGITS];  // from there to `moved`
    __shared__ uint32 of_warps[WARPS];
    const int warp = threadIdx.x / 32;
    const int64 tiles = (size + TILE - 1) / TILE;
    const uint32 digit_start = sum_before_in_block(__ldg(totals + threadIdx.x), of_warps);  // of digit threadIdx.x
    for (int64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        for (int i = 0; i < WARPS; ++i) of_warp[i][threadIdx.x] = 0;
        __syncthreads();
        const int64 first = tile * TILE + warp * (TILE / WARPS) + lane_id();
        uint64 held[TURNS];
        uint32 rank[TURNS];
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const int64 i = first + turn * 32;
            held[turn] = ~0ull;  // behind the last pair: ranks last among the highest digit, and is not written
            if (i < size) held[turn] = slots ? pair_of(slots, i, num_slots) : __ldg(pairs + i);
        }
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const uint32 digit = static_cast<uint32>(held[turn] >> shift & mask);
            const uint32 equal = __match_any_sync(ALL_LANES, digit);
            const uint32 before = equal & ((1u << lane_id()) - 1u);
            const uint32 so_far = of_warp[warp][digit];
            __syncwarp();  // all have read before the first of them writes
            if (before == 0) of_warp[warp][digit] = so_far + __popc(equal);
            __syncwarp();  // and the next turn reads what was written
            rank[turn] = so_far + __popc(before);
        }
        __syncthreads();
        uint32 sum = 0;
        for (int i = 0; i < WARPS; ++i) {
            const uint32 count = of_warp[i][threadIdx.x];
            of_warp[i][threadIdx.x] = sum;
            sum += count;
        }
        const uint32 start = sum_before_in_block(sum, of_warps);
        in_tile[threadIdx.x] = start;
        shift_of[threadIdx.x] = static_cast<int64>(digit_start) + __ldg(counts + threadIdx.x * tiles + tile) - start;
        __syncthreads();
#pragma unroll
        for (int turn = 0; turn < TURNS; ++turn) {
            const uint32 digit = static_cast<uint32>(held[turn] >> shift & mask);
            staged[in_tile[digit] + of_warp[warp][digit] + rank[turn]] = held[turn];
        }
        __syncthreads();
        const int count = size - tile * TILE < TILE ? static_cast<int>(size - tile * TILE) : TILE;
        for (int i = threadIdx.x; i < count; i += BLOCK_THREADS) {
            const uint64 pair = staged[i];
            moved[shift_of[pair >> shift & mask] + i] = pair;
        }
    }
}
