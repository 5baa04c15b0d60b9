// Counts the bytes that a kernel reads and writes in each array.
//
// The compiler calls these functions before every access to memory (-fsanitize=thread, whose own library is not
// linked). Stacks and static data are in no array, so accesses to them count nothing.

#pragma once

#include <cstdint>
#include <cstdlib>

#define UNCOUNTED __attribute__((no_sanitize("thread")))

namespace traffic {

constexpr uint64_t SECTOR = 32;  // bytes that a GPU moves at least

struct Array {
    uint64_t first, last;  // addresses
    uint64_t read, written;  // bytes of all accesses
    uint64_t sectors_read, sectors_written;  // distinct ones
    bool *was_read, *was_written;  // of each sector
};

// No class of the standard library: its functions would be counted, and count themselves without end.
inline Array* arrays;  // in order of addresses
inline int64_t num_arrays;

UNCOUNTED inline void note(uint64_t at, uint64_t size, bool is_write) {
    int64_t low = 0, high = num_arrays;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (arrays[middle].last <= at) low = middle + 1;
        else high = middle;
    }
    if (low == num_arrays || at < arrays[low].first) return;
    Array& array = arrays[low];
    (is_write ? array.written : array.read) += size;
    bool* seen = is_write ? array.was_written : array.was_read;
    for (uint64_t sector = at / SECTOR; sector <= (at + size - 1) / SECTOR; ++sector) {
        const uint64_t number = sector - array.first / SECTOR;
        if (seen[number]) continue;
        seen[number] = true;
        ++(is_write ? array.sectors_written : array.sectors_read);
    }
}

}  // namespace traffic

// ranges: (count, 2) addresses of arrays, in order.
extern "C" UNCOUNTED void traffic_begin(const uint64_t* ranges, int64_t count) {
    traffic::arrays = static_cast<traffic::Array*>(calloc(count, sizeof(traffic::Array)));
    for (int64_t i = 0; i < count; ++i) {
        traffic::Array& one = traffic::arrays[i];
        one.first = ranges[2 * i], one.last = ranges[2 * i + 1];
        const uint64_t sectors = one.last / traffic::SECTOR - one.first / traffic::SECTOR + 1;
        one.was_read = static_cast<bool*>(calloc(sectors, sizeof(bool)));
        one.was_written = static_cast<bool*>(calloc(sectors, sizeof(bool)));
    }
    traffic::num_arrays = count;
}

// counts: (count, 4): bytes read and written, and those of distinct sectors.
extern "C" UNCOUNTED void traffic_end(uint64_t* counts) {
    for (int64_t i = 0; i < traffic::num_arrays; ++i) {
        const traffic::Array& one = traffic::arrays[i];
        *counts++ = one.read, *counts++ = one.written;
        *counts++ = one.sectors_read * traffic::SECTOR, *counts++ = one.sectors_written * traffic::SECTOR;
        free(one.was_read), free(one.was_written);
    }
    free(traffic::arrays);
    traffic::num_arrays = 0;
}

#define COUNTED(SIZE) \
    extern "C" UNCOUNTED void __tsan_read##SIZE(void* at) { traffic::note(reinterpret_cast<uint64_t>(at), SIZE, false); } \
    extern "C" UNCOUNTED void __tsan_write##SIZE(void* at) { traffic::note(reinterpret_cast<uint64_t>(at), SIZE, true); } \
    extern "C" UNCOUNTED void __tsan_unaligned_read##SIZE(void* at) { __tsan_read##SIZE(at); } \
    extern "C" UNCOUNTED void __tsan_unaligned_write##SIZE(void* at) { __tsan_write##SIZE(at); }

COUNTED(1)
COUNTED(2)
COUNTED(4)
COUNTED(8)
COUNTED(16)

extern "C" UNCOUNTED void __tsan_read_range(void* at, uint64_t size) {
    traffic::note(reinterpret_cast<uint64_t>(at), size, false);
}
extern "C" UNCOUNTED void __tsan_write_range(void* at, uint64_t size) {
    traffic::note(reinterpret_cast<uint64_t>(at), size, true);
}
extern "C" UNCOUNTED void __tsan_init() {}
extern "C" UNCOUNTED void __tsan_func_entry(void*) {}
extern "C" UNCOUNTED void __tsan_func_exit() {}
extern "C" UNCOUNTED void __tsan_vptr_update(void**, void*) {}
