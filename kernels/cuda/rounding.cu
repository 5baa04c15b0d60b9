// What stochastic rounding keeps of a row: its stream, from which the step's kernels draw random bits.

#include "lanes.cuh"

extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
set_streams(uint64* streams, const int* slots, const int64* keys, int64 count, int64 table) {
    const int64 threads = 32 * num_warps();
    for (int64 i = blockIdx.x * static_cast<int64>(blockDim.x) + threadIdx.x; i < count; i += threads) {
        const int64 slot = slots ? __ldg(slots + i) : i;
        if (slot >= 0) streams[slot] = static_cast<uint64>(__ldg(keys + i)) ^ static_cast<uint64>(table);
    }
}
