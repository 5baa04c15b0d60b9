// One optimizer step of the rows of a batch: each row's gradients are summed in batch order, then the row changes once.
//
// A run is the pairs of one row. The sum of a run of more than STRETCH pairs is the sum, in order, of the sums of its
// stretches of STRETCH: so that many warps can share a hot row, and the bits depend on the batch alone, never on slots
// or on the number of blocks. (The CPU's kernels do so above 8192 pairs: up to STRETCH pairs the bits are theirs.)
//
// Stretches of long runs are summed first, by sum_stretches, to a row of `sums` each: that with number 2c for one that
// begins among the c-th STRETCH pairs and goes on with its run, 2c + 1 for the first of its run. No two stretches share
// a number: among STRETCH pairs at most one long run begins, and at most one goes on.

#include "gradients.cuh"
#include "lanes.cuh"
#include "vectors.cuh"

#define STRETCH 256

#define SGD 0
#define ADAGRAD 1
#define ROWWISE 2
#define ADAM 3

struct UpdatePart {  // one group
    int64 first_task;
    void* vectors;  // (num_slots, dim) float32, or 16-bit numbers
    float* first;  // state: (num_slots, dim), or (num_slots, 1) for ROWWISE
    float* second;  // state: (num_slots, dim)
    const uint64* pairs;  // (size,), sorted; slots from num_slots on have no row
    float* sums;  // (2 * stretches of `size`, padded)
    Gradients gradients;
    Rounding rounding;
    int64 size;
    int64 num_slots;
    int64 padded;  // elements of a row of `sums`
    int dim;
    int vec;
    int team;
    int is_half;
    float rate;
    float eps;
    float decay;
    float new1;  // the shares of the new value in Adam's averages
    float new2;
};

// The first place in [low, high) whose slot is not below `slot`, or `high`.
__device__ __forceinline__ int64 lower_bound(const uint64* pairs, uint64 slot, int64 low, int64 high) {
    while (low < high) {
        const int64 middle = (low + high) / 2;
        if (slot_of(__ldg(pairs + middle)) < slot) low = middle + 1;
        else high = middle;
    }
    return low;
}

__device__ __forceinline__ bool same_row(const UpdatePart& part, int64 place, uint32 slot) {
    return place < part.size && slot_of(__ldg(part.pairs + place)) == slot;
}

// Where the run of `slot` that holds `from` ends, if that is within STRETCH pairs from there; else the place behind.
__device__ __forceinline__ int64 end_within_stretch(const UpdatePart& part, int64 from, uint32 slot) {
    const int64 last = from + STRETCH < part.size ? from + STRETCH : part.size;
    return lower_bound(part.pairs, slot + 1ull, from, last);
}

// Find stretch `number` of all; false where no long run has it.
__device__ __forceinline__ bool find_stretch(const UpdatePart& part, int64 number, int64& start, int64& stop) {
    const int64 first = number / 2 * STRETCH, behind = first + STRETCH;
    if (behind > part.size && number % 2) return false;
    if (number % 2) {  // a long run that begins among these pairs holds the last of them
        const uint32 slot = slot_of(__ldg(part.pairs + behind - 1));
        if (slot >= part.num_slots || !same_row(part, behind, slot)) return false;
        if (first > 0 && same_row(part, first - 1, slot)) return false;
        start = lower_bound(part.pairs, slot, first, behind);
        if (!same_row(part, start + STRETCH, slot)) return false;
    } else {
        const uint32 slot = slot_of(__ldg(part.pairs + first));
        if (first == 0 || slot >= part.num_slots || !same_row(part, first - 1, slot)) return false;
        const int64 run = lower_bound(part.pairs, slot, 0, first);
        start = run + (first - run + STRETCH - 1) / STRETCH * STRETCH;
        if (!same_row(part, start, slot) || !same_row(part, run + STRETCH, slot)) return false;
    }
    stop = end_within_stretch(part, start, slot_of(__ldg(part.pairs + start)));
    return true;
}

template <int VEC> __device__ __forceinline__ void sum_stretch(const UpdatePart& part, int64 number) {
    int64 start, stop;
    if (!find_stretch(part, number, start, stop)) return;
    for (int d = lane_id() % part.team * VEC; d < part.dim; d += part.team * VEC) {
        Lanes<VEC> sum = zero_lanes<VEC>();
        add_pairs<VEC>(part.gradients, part.pairs, start, stop, d, sum);
        store_lanes<VEC>(part.sums + number * part.padded + d, sum);
    }
}

// A task is a stretch number for each team of a warp.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
sum_stretches(const UpdatePart* parts, int64 num_parts, int64 num_tasks) {
    for (int64 task = warp_id(); task < num_tasks; task += num_warps()) {
        const UpdatePart& part = part_of(parts, num_parts, task);
        const int64 number = (task - part.first_task) * (32 / part.team) + lane_id() / part.team;
        if (number >= (part.size + STRETCH - 1) / STRETCH * 2) continue;
        if (part.vec == 4) sum_stretch<4>(part, number);
        else sum_stretch<1>(part, number);
    }
}

// What the lanes of a warp know of its 32 pairs, for each other: looked up for all at once.
struct Window {
    Place places[32];
    uint32 slots[32];
    int64 first;
};

// The gradient of a row: elements [d, d + VEC) of the sum of its run, which is long where `stop` is -1.
template <int VEC>
__device__ __forceinline__ Lanes<VEC> sum_run(
    const UpdatePart& part, const Window& window, int64 start, int64 stop, uint32 slot, int d) {
    Lanes<VEC> sum = zero_lanes<VEC>();
    if (stop >= 0) {
        const int64 inside = stop < window.first + 32 ? stop : window.first + 32;
        const auto known = [&](int64 i) { return window.places[i - window.first]; };
        add_gradients<VEC>(part.gradients, start, inside, d, sum, known);
        if (inside < stop) add_pairs<VEC>(part.gradients, part.pairs, inside, stop, d, sum);
        return sum;
    }
    for (int64 at = start; same_row(part, at, slot); at += STRETCH) {
        const int64 number = at / STRETCH * 2 + (at == start ? 1 : 0);
        const Lanes<VEC> stretch = load_constant<VEC>(part.sums + number * part.padded + d);
#pragma unroll
        for (int k = 0; k < VEC; ++k) sum.v[k] += stretch.v[k];
    }
    return sum;
}

template <class T> __device__ __forceinline__ int64 place_of_row(const UpdatePart& part, uint32 slot) {
    return slot * static_cast<int64>(stride_of<T>(part.dim));
}

// Elements [d, d + VEC) of a row and its states, and of its gradient.
template <class T, int VEC> struct Held {
    Packed<T, VEC> row;
    Lanes<VEC> first, second, g;
};

// The row and its states are asked for before the gradients are summed, so that they are under way meanwhile.
template <class T, int VEC, int KIND>
__device__ __forceinline__ void prepare(
    const UpdatePart& part, const Window& window, int64 start, int64 stop, uint32 slot, int d, Held<T, VEC>& held) {
    const int64 at = slot * static_cast<int64>(part.dim) + d;
    held.row = load_written<VEC>(static_cast<const T*>(part.vectors) + place_of_row<T>(part, slot) + d);
    if constexpr (KIND == ADAGRAD || KIND == ADAM) held.first = load_lanes<VEC>(part.first + at);
    if constexpr (KIND == ADAM) held.second = load_lanes<VEC>(part.second + at);
    held.g = sum_run<VEC>(part, window, start, stop, slot, d);
    if (part.decay != 0.0f || KIND == ROWWISE) {
        const Lanes<VEC> values = widen<VEC>(held.row, part.is_half);
#pragma unroll
        for (int k = 0; k < VEC; ++k) held.g.v[k] += part.decay * values.v[k];
    }
}

// Change elements [d, d + VEC) of a row: as optimizers.apply on the CPU.
template <class T, int VEC, int KIND>
__device__ __forceinline__ void apply(
    const UpdatePart& part, uint32 slot, uint64 stream, int d, Held<T, VEC>& held, float rate) {
    const int64 at = slot * static_cast<int64>(part.dim) + d;
    const Lanes<VEC>& g = held.g;
    Lanes<VEC> values = widen<VEC>(held.row, part.is_half);
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
        if constexpr (KIND == ADAGRAD) {
            held.first.v[k] += g.v[k] * g.v[k];
            values.v[k] -= rate * g.v[k] / (sqrtf(held.first.v[k]) + part.eps);
        } else if constexpr (KIND == ADAM) {
            held.first.v[k] += (g.v[k] - held.first.v[k]) * part.new1;
            held.second.v[k] += (g.v[k] * g.v[k] - held.second.v[k]) * part.new2;
            values.v[k] -= rate * held.first.v[k] / (sqrtf(held.second.v[k]) + part.eps);
        } else {
            values.v[k] -= rate * g.v[k];
        }
    }
    if constexpr (KIND == ADAGRAD || KIND == ADAM) store_lanes<VEC>(part.first + at, held.first);
    if constexpr (KIND == ADAM) store_lanes<VEC>(part.second + at, held.second);
    T* to = static_cast<T*>(part.vectors) + place_of_row<T>(part, slot) + d;
    store_rounded<VEC>(to, values, d, stream, part.rounding.step, part.is_half);
}

// Change the row of the run that begins at `start`; a team does it.
template <class T, int VEC, int KIND>
__device__ __forceinline__ void update_row(
    const UpdatePart& part, const Window& window, int64 start, int64 stop, uint32 slot) {
    const int team = part.team, own = lane_id() % team * VEC, dim = part.dim;
    float rate = part.rate;
    Held<T, VEC> held = {};
    uint64 stream = 0;
    if constexpr (sizeof(T) == 2) stream = __ldg(part.rounding.streams + slot);
    if constexpr (KIND == ROWWISE) {
        const uint32 mask = team_mask(team);
        Lanes<VEC> classes = zero_lanes<VEC>();
        for (int turn = 0; turn < dim; turn += team * VEC) {
            Lanes<VEC> squares = zero_lanes<VEC>();
            if (turn + own < dim) {
                prepare<T, VEC, KIND>(part, window, start, stop, slot, turn + own, held);
#pragma unroll
                for (int k = 0; k < VEC; ++k) squares.v[k] = held.g.v[k] * held.g.v[k];
            }
            add_classes<VEC>(classes, squares, team, mask);
        }
        float mean = total<VEC>(classes, team, mask) / static_cast<float>(dim);
        if (own == 0) {
            mean += part.first[slot];
            part.first[slot] = mean;
        }
        mean = __shfl_sync(mask, mean, 0, team);
        rate = part.rate / (sqrtf(mean) + part.eps);
    }
    const bool prepared = KIND == ROWWISE && dim <= team * VEC;  // else the sums are made again, part by part
    for (int d = own; d < dim; d += team * VEC) {
        if (!prepared) prepare<T, VEC, KIND>(part, window, start, stop, slot, d, held);
        apply<T, VEC, KIND>(part, slot, stream, d, held, rate);
    }
}

// `bits` without the `count` lowest that are set.
__device__ __forceinline__ uint32 without_lowest(uint32 bits, int count) {
    for (int i = 0; i < count; ++i) bits &= bits - 1u;
    return bits;
}

// The teams of a warp take the runs that begin among its 32 pairs in turn.
template <class T, int KIND>
__device__ __forceinline__ void update_window(const UpdatePart& part, int64 first, Window& window) {
    const int64 own = first + lane_id();
    const uint64 pair = own < part.size ? __ldg(part.pairs + own) : 0;
    const uint32 slot = slot_of(pair);
    uint32 before = __shfl_up_sync(ALL_LANES, slot, 1);
    if (lane_id() == 0 && first > 0) before = slot_of(__ldg(part.pairs + first - 1));
    const bool begins = own < part.size && (own == 0 || slot != before);
    const uint32 bounds = __ballot_sync(ALL_LANES, begins);
    const uint32 starts = __ballot_sync(ALL_LANES, begins && slot < part.num_slots);
    if (own < part.size) window.places[lane_id()] = place_of(part.gradients, pair);
    window.slots[lane_id()] = slot;
    if (lane_id() == 0) window.first = first;
    __syncwarp();  // from here on lanes read what others looked up
    const int teams = 32 / part.team;
    uint32 left = without_lowest(starts, lane_id() / part.team);
    while (left) {
        const int lane = __ffs(static_cast<int>(left)) - 1;
        const int64 start = first + lane;
        const uint32 row = window.slots[lane];
        const uint32 behind = lane == 31 ? 0u : bounds >> (lane + 1);
        int64 stop = start + __ffs(static_cast<int>(behind));
        if (!behind) {  // no other run begins among the 32
            stop = first + 32 < part.size ? first + 32 : part.size;
            if (same_row(part, stop, row)) {
                stop = same_row(part, start + STRETCH, row) ? -1 : end_within_stretch(part, start, row);
            }
        }
        if (part.vec == 4) update_row<T, 4, KIND>(part, window, start, stop, row);
        else update_row<T, 1, KIND>(part, window, start, stop, row);
        left = without_lowest(left, teams);
    }
    __syncwarp();  // the next task writes to what was read here
}

// A task is 32 pairs. The parts of a launch have one kind and one width of vectors, so that no kernel holds the
// registers of another.
template <class T, int KIND>
__device__ __forceinline__ void update_parts(
    const UpdatePart* parts, int64 num_parts, int64 num_tasks, Window* windows) {
    Window& window = windows[threadIdx.x / 32];
    for (int64 task = warp_id(); task < num_tasks; task += num_warps()) {
        const UpdatePart& part = part_of(parts, num_parts, task);
        update_window<T, KIND>(part, (task - part.first_task) * 32, window);
    }
}

#define WARPS (BLOCK_THREADS / 32)

#define UPDATE_KERNEL(NAME, T, KIND) \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS) \
    NAME(const UpdatePart* parts, int64 num_parts, int64 num_tasks) { \
        __shared__ Window windows[WARPS]; \
        update_parts<T, KIND>(parts, num_parts, num_tasks, windows); \
    }

UPDATE_KERNEL(update_sgd, float, SGD)
UPDATE_KERNEL(update_adagrad, float, ADAGRAD)
UPDATE_KERNEL(update_rowwise_adagrad, float, ROWWISE)
UPDATE_KERNEL(update_adam, float, ADAM)
UPDATE_KERNEL(update_sgd_narrow, uint16, SGD)
UPDATE_KERNEL(update_adagrad_narrow, uint16, ADAGRAD)
UPDATE_KERNEL(update_rowwise_adagrad_narrow, uint16, ROWWISE)
UPDATE_KERNEL(update_adam_narrow, uint16, ADAM)
