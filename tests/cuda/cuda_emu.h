// Runs CUDA C++ kernels, as they are, on one CPU thread. For tests only.
//
// Each thread of a block is a fiber with a stack of its own. A barrier, shuffle or ballot is a real rendezvous, so
// removing a barrier changes what a kernel computes. Blocks run one after another in a shuffled order. Within a block,
// warps take turns in a shuffled order and each runs as far as it can alone, which is the interleaving that a missing
// barrier fears most; so do the lanes of a warp. Shared memory is filled with a pattern before each block, so a read of
// what nothing wrote shows. A rendezvous that not all threads reach is reported as a deadlock.
//
// Not emulated: memory ordering between blocks, alignment faults, the rounding of fast mathematics, speed.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>
#include <algorithm>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define VK_INF INFINITY
#define __global__ __attribute__((visibility("hidden")))
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#if defined(__SANITIZE_ADDRESS__)
#define __shared__ static  // with red zones around each variable, which a section of their own would not have
#else
#define __shared__ static __attribute__((section("emu_shared")))
#endif

struct alignas(16) uint4 {
  u32 x, y, z, w;
};
struct Index {
  unsigned x, y, z;
};
static Index blockIdx, gridDim, threadIdx;

namespace emu {

const size_t STACK_BYTES = 256 << 10;

// ---- switching stacks -----------------------------------------------------------------------------------------------

#if defined(__x86_64__)
struct Context {
  void* stack_pointer;
};
// Saves what the ABI says a callee must keep, on the old stack, and restores it from the new one.
extern "C" void emu_switch(Context* from, Context* to) __attribute__((visibility("hidden")));
asm(R"(
.text
.hidden emu_switch
.globl emu_switch
.type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq (%rsi), %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch, .-emu_switch
)");
static void prepare(Context* context, char* stack, void (*entry)()) {
  void** top = (void**)(((uintptr_t)stack + STACK_BYTES) & ~(uintptr_t)15);
  *--top = nullptr;  // where entry would return to: it never does
  *--top = (void*)entry;
  for (int i = 0; i < 6; i++) *--top = nullptr;
  context->stack_pointer = top;
}
#else
struct Context {
  ucontext_t context;
};
static void emu_switch(Context* from, Context* to) { swapcontext(&from->context, &to->context); }
static void prepare(Context* context, char* stack, void (*entry)()) {
  getcontext(&context->context);
  context->context.uc_stack.ss_sp = stack;
  context->context.uc_stack.ss_size = STACK_BYTES;
  context->context.uc_link = nullptr;
  makecontext(&context->context, entry, 0);
}
#endif

struct Fiber {
  Context context;
  char* stack = nullptr;
  void* fake_stack = nullptr;
  bool done = false;
};
static std::vector<Fiber> fibers;
static Context scheduler;
static unsigned current, n_alive;
static long progress;  // grows whenever a fiber starts to wait, stops waiting or ends
#if defined(__SANITIZE_ADDRESS__)
static const void* scheduler_stack;
static size_t scheduler_stack_bytes;
#endif

static void resume(unsigned thread) {
  current = thread;
  threadIdx = {thread, 0, 0};
#if defined(__SANITIZE_ADDRESS__)
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(&fake, fibers[thread].stack, STACK_BYTES);
#endif
  emu_switch(&scheduler, &fibers[thread].context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(fake, nullptr, nullptr);
#endif
}
static void yield() {
  Fiber& me = fibers[current];
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(me.done ? nullptr : &me.fake_stack, scheduler_stack, scheduler_stack_bytes);
#endif
  emu_switch(&me.context, &scheduler);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(me.fake_stack, &scheduler_stack, &scheduler_stack_bytes);
#endif
}

// ---- rendezvous -----------------------------------------------------------------------------------------------------

static unsigned n_at_barrier, barrier_generation;
static int skipped_barrier = -1;  // source line of a barrier that is left out
static long barrier_hits;         // how often that one was passed

static void release_barrier() { n_at_barrier = 0, barrier_generation++; }
static void syncthreads(int line) {
  if (line == skipped_barrier) {
    barrier_hits++;
    return;
  }
  const unsigned generation = barrier_generation;
  progress++;
  if (++n_at_barrier == n_alive) release_barrier();
  while (generation == barrier_generation) yield();
}

// Four slots in turn: a lane may be one exchange ahead of the slowest, and its slot must not be one still being read.
struct Warp {
  u64 slots[4][32];
  unsigned n_in[4], next[32];
};
static std::vector<Warp> warps;

static unsigned exchange(u64 bits) {  // returns the slot in which all lanes' values stand
  Warp& warp = warps[current / 32];
  const unsigned lane = current % 32, slot = warp.next[lane]++ % 4;
  warp.slots[slot][lane] = bits;
  progress++;
  if (++warp.n_in[slot] == 32) warp.n_in[(slot + 2) % 4] = 0;
  while (warp.n_in[slot] != 32) yield();
  return slot;
}
template <class T>
static T shuffle(T value, int from) {
  static_assert(sizeof(T) <= 8 && std::is_trivially_copyable<T>::value, "a shuffle moves up to 64 bits");
  u64 bits = 0;
  memcpy(&bits, &value, sizeof(T));
  const unsigned slot = exchange(bits);
  if (from < 0 || from > 31) return value;
  memcpy(&value, &warps[current / 32].slots[slot][from], sizeof(T));
  return value;
}
static u32 ballot(bool vote) {
  const unsigned slot = exchange(vote);
  u32 votes = 0;
  for (int lane = 0; lane < 32; lane++) votes |= (u32)warps[current / 32].slots[slot][lane] << lane;
  return votes;
}

// ---- launching ------------------------------------------------------------------------------------------------------

extern "C" char __start_emu_shared[] __attribute__((visibility("hidden")));
extern "C" char __stop_emu_shared[] __attribute__((visibility("hidden")));
static u64 seed = 1;
static void (*kernel_call)(const void*);
static const void* kernel_params;

static void run_fiber() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack, &scheduler_stack_bytes);
#endif
  kernel_call(kernel_params);
  fibers[current].done = true;
  n_alive--, progress++;
  if (n_alive && n_at_barrier == n_alive) release_barrier();
  while (true) yield();
}

static bool run_block(unsigned n_threads, std::mt19937_64& random) {
#if !defined(__SANITIZE_ADDRESS__)
  memset(__start_emu_shared, 0xA5, __stop_emu_shared - __start_emu_shared);
#endif
  for (unsigned i = 0; i < n_threads; i++) {
    fibers[i].done = false;
    prepare(&fibers[i].context, fibers[i].stack, run_fiber);
  }
  memset(warps.data(), 0, warps.size() * sizeof(Warp));
  n_alive = n_threads, n_at_barrier = 0;
  std::vector<unsigned> warp_order(warps.size()), lane_order(32);
  for (unsigned i = 0; i < warp_order.size(); i++) warp_order[i] = i;
  for (unsigned i = 0; i < 32; i++) lane_order[i] = i;
  while (n_alive) {
    const long before_round = progress;
    std::shuffle(warp_order.begin(), warp_order.end(), random);
    for (unsigned warp : warp_order) {
      std::shuffle(lane_order.begin(), lane_order.end(), random);
      long before_turn;
      do {
        before_turn = progress;
        for (unsigned lane : lane_order)
          if (!fibers[warp * 32 + lane].done) resume(warp * 32 + lane);
      } while (progress != before_turn);
    }
    if (progress == before_round) return false;
  }
  return true;
}

template <class Params>
static int launch(void (*kernel)(const Params), Index grid, unsigned n_threads, const Params* params) {
  static void (*called)(const Params);
  called = kernel;
  kernel_call = [](const void* p) { called(*(const Params*)p); };
  kernel_params = params;
  fibers.resize(n_threads);
  warps.resize(n_threads / 32);
  for (Fiber& fiber : fibers)
    if (!fiber.stack) fiber.stack = (char*)malloc(STACK_BYTES);
  gridDim = grid;
  std::mt19937_64 random(seed);
  std::vector<unsigned> order(grid.x * grid.y * grid.z);
  for (unsigned i = 0; i < order.size(); i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), random);
  for (unsigned block : order) {
    blockIdx = {block % grid.x, block / grid.x % grid.y, block / grid.x / grid.y};
    if (!run_block(n_threads, random)) {
      fprintf(stderr, "emulator: deadlock in block (%u, %u, %u)\n", blockIdx.x, blockIdx.y, blockIdx.z);
      return 1;
    }
  }
  return 0;
}

}  // namespace emu

// ---- what CUDA C++ offers to kernels --------------------------------------------------------------------------------

using std::max;
using std::min;
#define __syncthreads() emu::syncthreads(__LINE__)
#define __threadfence() ((void)0)
#define __shfl_xor_sync(mask, value, o) emu::shuffle((value), (int)(threadIdx.x % 32) ^ (int)(o))
#define __shfl_up_sync(mask, value, o) emu::shuffle((value), (int)(threadIdx.x % 32) - (int)(o))
#define __ballot_sync(mask, vote) emu::ballot(vote)

template <class To, class From>
static inline To emu_bits(From value) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To bits;
  memcpy(&bits, &value, sizeof(To));
  return bits;
}
static inline u32 __float_as_uint(float x) { return emu_bits<u32>(x); }
static inline float __uint_as_float(u32 x) { return emu_bits<float>(x); }
static inline int __float_as_int(float x) { return emu_bits<int>(x); }
static inline float __int_as_float(int x) { return emu_bits<float>(x); }
static inline int __popc(u32 x) { return __builtin_popcount(x); }
static inline int __ffs(u32 x) { return __builtin_ffs((int)x); }
static inline int __clzll(long long x) { return x ? __builtin_clzll((unsigned long long)x) : 64; }
static inline float half_to_float(u16 bits) {  // IEEE binary16, written out: not every compiler has the type
  const u32 exponent = bits >> 10 & 31, fraction = bits & 1023;
  float value = exponent == 31 ? (fraction ? NAN : INFINITY)
                : exponent     ? std::ldexp((float)(fraction | 1024), (int)exponent - 25)
                               : std::ldexp((float)fraction, -24);
  return bits & 0x8000 ? -value : value;
}
template <class T>
static inline T atomicAdd(T* p, typename std::common_type<T>::type value) {
  T old = *p;
  *p = old + value;
  return old;
}
template <class T>
static inline T atomicMax(T* p, typename std::common_type<T>::type value) {
  T old = *p;
  *p = max(old, value);
  return old;
}
template <class T>
static inline T atomicMin(T* p, typename std::common_type<T>::type value) {
  T old = *p;
  *p = min(old, value);
  return old;
}
template <class T>
static inline T atomicOr(T* p, typename std::common_type<T>::type value) {
  T old = *p;
  *p = old | value;
  return old;
}
