// How a launch runs on the CPU: fibres for the threads of a block, what they wait for, and what ends a launch.

#pragma once

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/mman.h>
#include <type_traits>
#include <unistd.h>
#include <utility>
#include <vector>

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
};

extern "C" char __start_shim_shared[] __attribute__((weak));
extern "C" char __stop_shim_shared[] __attribute__((weak));

namespace shim {

enum Order { FORWARD, REVERSED, RANDOM };

struct Meeting {  // of the lanes of a mask, at one operation
    const void* place = nullptr;
    uint32_t mask = 0, arrived = 0, left = 0;
    bool complete = false;
    uint64_t values[32];
};

struct Fibre {
    void* stack_pointer = nullptr;
    char* stack = nullptr;
    dim3 thread;
    unsigned number = 0;
    const bool* waits_for = nullptr;
    bool done = true;
};

constexpr size_t STACK = 64 << 10;

inline std::vector<Fibre> fibres;
inline std::vector<std::vector<Meeting*>> meetings;  // per warp
inline std::vector<Meeting*> free_meetings;
inline Fibre* current = nullptr;
inline void* scheduler = nullptr;
inline dim3 block_index, block_size, grid_size;
inline unsigned alive = 0, at_barrier = 0;
inline bool* barrier = nullptr;
inline void (*body)(void**) = nullptr;
inline void** arguments = nullptr;
inline char trouble[512];
inline sigjmp_buf way_out;

[[noreturn]] inline void fail(const char* sentence) {
    const unsigned thread = current ? current->number : 0;
    snprintf(trouble, sizeof trouble, "block %u, thread %u: %s", block_index.x, thread, sentence);
    siglongjmp(way_out, 1);
}

extern "C" void shim_switch(void** from, void* to);
#if defined(__x86_64__)
asm(R"(
.text
.local shim_switch
.type shim_switch, @function
shim_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
#elif defined(__aarch64__)
asm(R"(
.text
.local shim_switch
.type shim_switch, %function
shim_switch:
    sub sp, sp, #160
    stp x19, x20, [sp, #0]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp, #0]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#else
#error "the shim knows how to switch fibres on x86-64 and 64-bit Arm"
#endif

inline void wait_for(const bool* flag) {
    while (!*flag) {
        current->waits_for = flag;
        shim_switch(&current->stack_pointer, scheduler);
    }
    current->waits_for = nullptr;
}

inline void open_barrier() {
    *barrier = true;
    static bool flags[2];
    barrier = barrier == &flags[0] ? &flags[1] : &flags[0];
    *barrier = false;
    at_barrier = 0;
}

inline void sync_threads() {
    const bool* mine = barrier;
    if (++at_barrier == alive) open_barrier();
    wait_for(mine);
}

[[noreturn]] inline void enter() {
    body(arguments);
    current->done = true;
    --alive;
    if (alive && at_barrier == alive) open_barrier();
    shim_switch(&current->stack_pointer, scheduler);
    abort();
}

inline void prepare(Fibre& fibre) {
    auto* top = reinterpret_cast<void**>(fibre.stack + STACK);
#if defined(__x86_64__)
    top -= 2;
    top[0] = reinterpret_cast<void*>(&enter);
    top[1] = nullptr;
    top -= 6;
#else
    top -= 20;
    top[11] = reinterpret_cast<void*>(&enter);
#endif
    fibre.stack_pointer = top;
    fibre.done = false;
    fibre.waits_for = nullptr;
}

// Every lane of `mask` brings a value; each gets the meeting when all are there, and must `leave` it.
inline Meeting* meet(uint32_t mask, uint64_t value, const void* place) {
    const unsigned lane = current->number % 32;
    if (!(mask >> lane & 1)) fail("a lane takes part in a warp's operation whose mask does not name it.");
    auto& warp = meetings[current->number / 32];
    Meeting* meeting = nullptr;
    for (Meeting* m : warp) {
        if (!m->complete && m->mask == mask && m->place == place && !(m->arrived >> lane & 1)) meeting = m;
    }
    if (!meeting) {
        if (free_meetings.empty()) free_meetings.push_back(new Meeting);
        meeting = free_meetings.back();
        free_meetings.pop_back();
        meeting->place = place;
        meeting->mask = mask, meeting->arrived = 0, meeting->left = 0, meeting->complete = false;
        warp.push_back(meeting);
    }
    meeting->values[lane] = value;
    meeting->arrived |= 1u << lane;
    if (meeting->arrived == mask) meeting->complete = true;
    wait_for(&meeting->complete);
    return meeting;
}

inline void leave(Meeting* meeting) {
    meeting->left |= 1u << current->number % 32;
    if (meeting->left != meeting->mask) return;
    auto& warp = meetings[current->number / 32];
    for (size_t i = 0; i < warp.size(); ++i) {
        if (warp[i] == meeting) warp[i] = warp.back();
    }
    warp.pop_back();
    free_meetings.push_back(meeting);
}

template <class T> uint64_t bits_of(T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8);
    uint64_t bits = 0;
    memcpy(&bits, &value, sizeof value);
    return bits;
}

template <class T> T value_of(uint64_t bits) {
    T value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

template <class T> T shuffle(uint32_t mask, T value, unsigned from, const void* place) {
    Meeting* meeting = meet(mask, bits_of(value), place);
    if (!(mask >> from & 1)) fail("a shuffle reads from a lane that its mask does not name.");
    const T taken = value_of<T>(meeting->values[from]);
    leave(meeting);
    return taken;
}

inline unsigned lane() { return current->number % 32; }

// ---- launching

inline struct sigaction old_segv, old_bus, old_ill;
inline char alternate[64 << 10];

inline void on_signal(int number, siginfo_t* info, void*) {
    char sentence[200];
    if (number == SIGILL || number == SIGTRAP) {
        snprintf(sentence, sizeof sentence, "an index is outside its array in shared or local memory, or an access not aligned.");
    } else {
        snprintf(sentence, sizeof sentence, "address %p is outside every array.", info->si_addr);
    }
    fail(sentence);
}

struct Random {
    uint64_t state;

    uint64_t operator()() {  // splitmix64
        uint64_t z = state += 0x9E3779B97F4A7C15u;
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
        z = (z ^ z >> 27) * 0x94D049BB133111EBu;
        return z ^ z >> 31;
    }
};

inline void run_block(Order order, Random& random) {
    const unsigned threads = block_size.x * block_size.y * block_size.z;
    if (__start_shim_shared) memset(__start_shim_shared, 0xA5, __stop_shim_shared - __start_shim_shared);
    for (auto& warp : meetings) {
        for (Meeting* m : warp) free_meetings.push_back(m);
        warp.clear();
    }
    alive = threads;
    at_barrier = 0;
    static bool first_flag;
    first_flag = false;
    barrier = &first_flag;
    std::vector<unsigned> turns(threads);
    for (unsigned i = 0; i < threads; ++i) {
        turns[i] = order == REVERSED ? threads - 1 - i : i;
        prepare(fibres[i]);
    }
    while (alive) {
        if (order == RANDOM) {
            for (unsigned i = threads - 1; i > 0; --i) std::swap(turns[i], turns[random() % (i + 1)]);
        }
        bool moved = false;
        for (unsigned number : turns) {
            Fibre& fibre = fibres[number];
            if (fibre.done || (fibre.waits_for && !*fibre.waits_for)) continue;
            moved = true;
            current = &fibre;
            shim_switch(&scheduler, fibre.stack_pointer);
        }
        if (!moved) {
            for (auto& fibre : fibres) {
                if (!fibre.done) current = &fibre;
            }
            fail("threads wait for each other without end: they are at different barriers, or one has ended.");
        }
    }
    current = nullptr;
}

// Take subnormal numbers for zero, as a GPU does with code compiled by -ftz=true.
inline void flush(bool wanted) {
#if defined(__x86_64__)
    const uint32_t before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(wanted ? before | 0x8040u : before & ~0x8040u);
#elif defined(__aarch64__)
    uint64_t before;
    asm volatile("mrs %0, fpcr" : "=r"(before));
    asm volatile("msr fpcr, %0" : : "r"(wanted ? before | 1u << 24 : before & ~(1ull << 24)));
#endif
}

inline const char* run(void (*kernel)(void**), void** words, const unsigned* grid, const unsigned* block,
                       int order, uint64_t seed, bool flushes) {
    grid_size = {grid[0], grid[1], grid[2]}, block_size = {block[0], block[1], block[2]};
    const unsigned threads = block[0] * block[1] * block[2];
    while (fibres.size() < threads) {
        Fibre fibre;
        char* memory = static_cast<char*>(mmap(nullptr, STACK + 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(memory + 4096, STACK, PROT_READ | PROT_WRITE);
        fibre.stack = memory + 4096;
        fibres.push_back(fibre);
    }
    for (unsigned i = 0; i < fibres.size(); ++i) {
        fibres[i].number = i;
        fibres[i].done = true;
        fibres[i].thread = {i % block[0], i / block[0] % block[1], i / block[0] / block[1]};
    }
    meetings.resize((threads + 31) / 32);
    body = kernel, arguments = words;
    Random random{seed};
    stack_t old_stack, stack = {};
    stack.ss_sp = alternate, stack.ss_size = sizeof alternate;
    sigaltstack(&stack, &old_stack);
    struct sigaction action = {};
    action.sa_sigaction = on_signal, action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, &old_segv), sigaction(SIGBUS, &action, &old_bus), sigaction(SIGILL, &action, &old_ill);
    trouble[0] = 0;
    flush(flushes);
    if (!sigsetjmp(way_out, 1)) {
        const uint64_t blocks = static_cast<uint64_t>(grid[0]) * grid[1] * grid[2];
        std::vector<uint64_t> turns(blocks);
        for (uint64_t i = 0; i < blocks; ++i) turns[i] = order == REVERSED ? blocks - 1 - i : i;
        for (uint64_t i = blocks; order == RANDOM && i > 1; --i) std::swap(turns[i - 1], turns[random() % i]);
        for (const uint64_t at : turns) {
            block_index = {static_cast<unsigned>(at % grid[0]), static_cast<unsigned>(at / grid[0] % grid[1]),
                           static_cast<unsigned>(at / grid[0] / grid[1])};
            run_block(static_cast<Order>(order), random);
        }
    }
    sigaction(SIGSEGV, &old_segv, nullptr), sigaction(SIGBUS, &old_bus, nullptr), sigaction(SIGILL, &old_ill, nullptr);
    sigaltstack(&old_stack, nullptr);
    flush(false);
    current = nullptr;
    return trouble[0] ? trouble : nullptr;
}

template <class... A, size_t... I>
void apply(void (*kernel)(A...), void** words, std::index_sequence<I...>) {
    static_assert(((std::is_pointer_v<A> || std::is_same_v<A, long long> || std::is_same_v<A, float> || std::is_class_v<A>)&&...),
                  "kernels take pointers, int64, float and structs");
    kernel(*reinterpret_cast<A*>(words[I])...);
}

template <class... A> void call(void (*kernel)(A...), void** words) {
    apply(kernel, words, std::index_sequence_for<A...>{});
}

}  // namespace shim
