// One optimizer step of the rows of a batch: each row's gradients are summed in batch order, then the row changes once.
//
// A run is the entries of one row. The sum of a run of more than STRETCH entries is the sum, in order, of the sums of
// its stretches of STRETCH, so that many warps can share a hot row, and the bits depend on the batch alone, never on
// slots or on the number of blocks. (The CPU's kernels do so above 8192 entries: up to STRETCH the bits are theirs.)
//
// Stretches of long runs are summed first, by sum_stretches, to a row of `sums` each: number 2c for a stretch that
// begins among the c-th STRETCH places and continues its run, 2c + 1 for the first of its run. No two stretches share
// a number: among STRETCH places at most one long run begins, and at most one continues.

#include "gradients.cuh"
#include "lanes.cuh"
#include "rules.cuh"
#include "vectors.cuh"

#define STRETCH 64
#define RUNS_OF_TASK 8  // for each team of a warp
#define SUMS_IN_FLIGHT 4

// The most blocks per SM of each kernel without register spills; the compiler uses more registers for newer GPUs.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define BLOCKS_OF_SM(COUNT) (COUNT / 2)
#else
#define BLOCKS_OF_SM(COUNT) COUNT
#endif

struct UpdatePart {  // one group
    int64 first_task;
    void* vectors;  // (num_slots, dim) float32, or 16-bit numbers
    float* first;  // states: (num_slots, dim), or for the last of a row-wise rule (num_slots, 1)
    float* second;
    const uint32* entries;  // as sorting.cu writes them; slots from num_slots on have no row
    const uint64* runs;
    const uint32* run_at;
    const int* slot_of;  // the slot of each position, if runs are of positions; else null
    float* sums;  // (2 * stretches of `size`, padded)
    const float* means;  // of each entry, of a row-wise rule for slices of rows: else null
    Gradients gradients;
    Rounding rounding;
    int64 size;  // entries
    int64 num_slots;
    int64 padded;  // elements of a row of `sums`
    int dim;
    int vec;
    int team;
    int is_half;
    Rule rule;
};

struct Run {
    int start;
    int stop;
    uint32 slot;
};

__device__ __forceinline__ Run run_of(const UpdatePart& part, int64 number) {
    const uint64 here = __ldg(part.runs + number), next = __ldg(part.runs + number + 1);
    const uint32 key = static_cast<uint32>(here >> 32);
    const uint32 slot = part.slot_of ? static_cast<uint32>(__ldg(part.slot_of + key)) : key;
    return {static_cast<int>(here), static_cast<int>(next), slot};
}

__device__ __forceinline__ bool is_long(const UpdatePart& part, const Run& run) {
    return run.stop - run.start > STRETCH && run.slot < part.num_slots;
}

template <int VEC, bool ANY>
__device__ __forceinline__ void sum_stretch(
    const UpdatePart& part, const Run& run, int64 start, int64 number, int team) {
    const int64 stop = run.stop - start < STRETCH ? run.stop : start + STRETCH;
    for (int turn = 0; turn < part.dim; turn += team * VEC) {
        const int d = turn + lane_id() % team * VEC;
        Lanes<VEC> sum = zero_lanes<VEC>();
        add_gradients<VEC, ANY>(part.gradients, part.entries, start, stop, d < part.dim ? d : 0, sum, team);
        if (d < part.dim) store_lanes<VEC>(part.sums + number * part.padded + d, sum);
    }
}

// Sum the stretches of long runs that begin among STRETCH places; a team does it.
template <int VEC, bool ANY>
__device__ __forceinline__ void sum_among(const UpdatePart& part, int64 number, int team) {
    const int64 first = number * STRETCH, end = first + STRETCH;
    if (first >= part.size) return;
    const Run before = run_of(part, __ldg(part.run_at + number));
    if (before.start < first && is_long(part, before)) {
        const int64 start = before.start + (first - before.start + STRETCH - 1) / STRETCH * STRETCH;
        if (start < before.stop) sum_stretch<VEC, ANY>(part, before, start, 2 * number, team);
    }
    if (end >= part.size) return;
    const Run last = run_of(part, __ldg(part.run_at + number + 1));
    if (last.start >= first && last.start < end && is_long(part, last)) {
        sum_stretch<VEC, ANY>(part, last, last.start, 2 * number + 1, team);
    }
}

// A task is STRETCH places for each team of a warp.
template <bool ANY> __device__ __forceinline__ void sum_parts(const Parts<UpdatePart>& parts) {
    for (int64 task = warp_id(); task < parts.num_tasks; task += num_warps()) {
        const UpdatePart& part = part_of(parts, task);
        const int team = part.team;
        const int64 number = (task - part.first_task) * (32 / team) + lane_id() / team;
        if constexpr (!ANY) sum_among<4, false>(part, number, team);
        else if (part.vec == 4) sum_among<4, true>(part, number, team);
        else sum_among<1, true>(part, number, team);
    }
}

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_OF_SM(4))
sum_stretches(const __grid_constant__ Parts<UpdatePart> parts) { sum_parts<false>(parts); }

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_OF_SM(2))
sum_stretches_any(const __grid_constant__ Parts<UpdatePart> parts) { sum_parts<true>(parts); }

// The gradient of a row: elements [d, d + VEC) of the sum of its run.
template <int VEC, bool ANY>
__device__ __forceinline__ Lanes<VEC> sum_run(const UpdatePart& part, const Run& run, int d, int team) {
    Lanes<VEC> sum = zero_lanes<VEC>();
    if (run.stop - run.start <= STRETCH) {
        add_gradients<VEC, ANY>(part.gradients, part.entries, run.start, run.stop, d, sum, team);
        return sum;
    }
    const float* from = part.sums + (run.start / STRETCH * 2 + 1) * part.padded + d;
    sum = load_constant<VEC>(from);
    from += part.padded;  // the others have every second number from here on
    int left = (run.stop - run.start - 1) / STRETCH;
#pragma unroll 1
    for (; left >= SUMS_IN_FLIGHT; left -= SUMS_IN_FLIGHT) {
        Lanes<VEC> held[SUMS_IN_FLIGHT];
#pragma unroll
        for (int u = 0; u < SUMS_IN_FLIGHT; ++u, from += 2 * part.padded) held[u] = load_constant<VEC>(from);
#pragma unroll
        for (int u = 0; u < SUMS_IN_FLIGHT; ++u) {
#pragma unroll
            for (int k = 0; k < VEC; ++k) sum.v[k] += held[u].v[k];
        }
    }
#pragma unroll 1
    for (; left > 0; --left, from += 2 * part.padded) {
        const Lanes<VEC> one = load_constant<VEC>(from);
#pragma unroll
        for (int k = 0; k < VEC; ++k) sum.v[k] += one.v[k];
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

// The row is loaded before the gradients are summed, and its states are prefetched, so that the accesses overlap.
template <class T, int VEC, int KIND, bool ANY>
__device__ __forceinline__ void prepare(
    const UpdatePart& part, const Run& run, int d, Held<T, VEC>& held, int team) {
    const int64 at = run.slot * static_cast<int64>(part.dim) + d;
    held.row = load_written<VEC>(static_cast<const T*>(part.vectors) + place_of_row<T>(part, run.slot) + d);
    if constexpr (elements_of(KIND) > 0) prefetch(part.first + at);  // they would take registers meanwhile
    if constexpr (elements_of(KIND) > 1) prefetch(part.second + at);
    held.g = sum_run<VEC, ANY>(part, run, d, team);
    if (part.rule.decay != 0.0f || is_row_wise(KIND)) {
        const Lanes<VEC> values = widen<VEC>(held.row, part.is_half);
#pragma unroll
        for (int k = 0; k < VEC; ++k) held.g.v[k] += part.rule.decay * values.v[k];
    }
}

// Change elements [d, d + VEC) of a row.
template <class T, int VEC, int KIND>
__device__ __forceinline__ void apply(
    const UpdatePart& part, uint32 slot, uint64 stream, int d, Held<T, VEC>& held, float rate) {
    const int64 at = slot * static_cast<int64>(part.dim) + d;
    if constexpr (elements_of(KIND) > 0) held.first = load_lanes<VEC>(part.first + at);
    if constexpr (elements_of(KIND) > 1) held.second = load_lanes<VEC>(part.second + at);
    Lanes<VEC> values = widen<VEC>(held.row, part.is_half);
#pragma unroll
    for (int k = 0; k < VEC; ++k) {
        const float change = step_element<KIND>(part.rule, rate, held.g.v[k], held.first.v[k], held.second.v[k]);
        values.v[k] = values.v[k] * part.rule.keep - change;
    }
    if constexpr (elements_of(KIND) > 0) store_lanes<VEC>(part.first + at, held.first);
    if constexpr (elements_of(KIND) > 1) store_lanes<VEC>(part.second + at, held.second);
    T* to = static_cast<T*>(part.vectors) + place_of_row<T>(part, slot) + d;
    store_rounded<VEC>(to, values, d, stream, part.rounding.step, part.is_half);
}

// Change the row of a run; a team does it. Lanes past the last element follow the first ones and write nothing.
template <class T, int VEC, int KIND, bool ANY>
__device__ __forceinline__ void update_row(const UpdatePart& part, const Run& run, int team) {
    const int own = lane_id() % team * VEC, dim = part.dim;
    float rate = part.rule.rate;
    Held<T, VEC> held = {};
    uint64 stream = 0;
    if constexpr (sizeof(T) == 2) stream = __ldg(part.rounding.streams + run.slot);
    if constexpr (is_row_wise(KIND)) {
        const uint32 mask = team_mask(team);
        Lanes<VEC> classes = zero_lanes<VEC>();
        for (int turn = 0; turn < dim; turn += team * VEC) {
            Lanes<VEC> squares = zero_lanes<VEC>();
            prepare<T, VEC, KIND, ANY>(part, run, turn + own < dim ? turn + own : 0, held, team);
            if (turn + own < dim) {
#pragma unroll
                for (int k = 0; k < VEC; ++k) squares.v[k] = held.g.v[k] * held.g.v[k];
            }
            add_classes<VEC>(classes, squares, team, mask);
        }
        float number = total<VEC>(classes, team, mask) / static_cast<float>(dim);
        if (own == 0) {
            if (part.means) number = __ldg(part.means + __ldg(part.entries + run.start));
            float* at = (elements_of(KIND) > 0 ? part.second : part.first) + run.slot;
            *at = number = step_number<KIND>(part.rule, *at, number);
        }
        number = __shfl_sync(mask, number, 0, team);
        rate = part.rule.rate / (sqrtf(number) + part.rule.eps);
    }
    const bool prepared = is_row_wise(KIND) && dim <= team * VEC;  // else the sums are computed again, part by part
    for (int turn = 0; turn < dim; turn += team * VEC) {
        const int d = turn + own;
        if (!prepared) prepare<T, VEC, KIND, ANY>(part, run, d < dim ? d : 0, held, team);
        if (d < dim) apply<T, VEC, KIND>(part, run.slot, stream, d, held, rate);
    }
}

// A task is RUNS_OF_TASK runs for each team of a warp: neighboring teams take neighboring runs. The parts of a launch
// have one kind and one width of vectors, so that no kernel holds the registers of another.
template <class T, int KIND, bool ANY>
__device__ __forceinline__ void update_parts(const Parts<UpdatePart>& parts) {
#pragma unroll 1
    for (int task = static_cast<int>(warp_id()); task < parts.num_tasks; task += static_cast<int>(num_warps())) {
        const UpdatePart& part = part_of(parts, task);
        const int team = part.team, teams = 32 / team;
        const int num_runs = static_cast<int>(__ldg(part.run_at + (part.size + STRETCH - 1) / STRETCH));
        const int first = (task - static_cast<int>(part.first_task)) * RUNS_OF_TASK * teams + lane_id() / team;
        const int last = num_runs - first < RUNS_OF_TASK * teams ? num_runs : first + RUNS_OF_TASK * teams;
#pragma unroll 1
        for (int number = first; number < last; number += teams) {
            const Run run = run_of(part, number);
            if (run.slot >= part.num_slots) continue;
            if constexpr (!ANY) update_row<T, 4, KIND, false>(part, run, team);
            else if (part.vec == 4) update_row<T, 4, KIND, true>(part, run, team);
            else update_row<T, 1, KIND, true>(part, run, team);
        }
    }
}

#define UPDATE_KERNEL(NAME, T, KIND, ANY, BLOCKS) \
    extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, BLOCKS_OF_SM(BLOCKS)) \
    NAME(const __grid_constant__ Parts<UpdatePart> parts) { \
        update_parts<T, KIND, ANY>(parts); \
    }

#define UPDATE_KERNELS(NAME, KIND, BLOCKS) \
    UPDATE_KERNEL(update_##NAME, float, KIND, false, BLOCKS) \
    UPDATE_KERNEL(update_##NAME##_narrow, uint16, KIND, false, BLOCKS) \
    UPDATE_KERNEL(update_##NAME##_any, float, KIND, true, 2) \
    UPDATE_KERNEL(update_##NAME##_narrow_any, uint16, KIND, true, 2)

RULES(UPDATE_KERNELS)
