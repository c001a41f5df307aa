// A shared library that runs the kernels of kvfetch.cu over the emulator; loaded by emulator.py.
#define VK_EMULATED
#include "cuda_emu.h"
#include "kvfetch.cu"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int emu_params_bytes() { return sizeof(Params); }
EXPORT int emu_state_bytes() { return sizeof(RowState); }
EXPORT void emu_seed(u64 seed) { emu::seed = seed; }
EXPORT void emu_skip_barrier(int line) { emu::skipped_barrier = line, emu::barrier_hits = 0; }
EXPORT long emu_barrier_hits() { return emu::barrier_hits; }
EXPORT int emu_launch(const char* name, unsigned x, unsigned y, unsigned z, const Params* params) {
#define KERNEL(kernel) \
  if (!strcmp(name, #kernel)) return emu::launch<Params>(kernel, {x, y, z}, NT, params);
  KERNEL(vk_score)
  KERNEL(vk_peak)
  KERNEL(vk_shortlist)
  KERNEL(vk_plan)
  KERNEL(vk_emit)
  KERNEL(vk_settle)
  KERNEL(vk_gather)
  KERNEL(vk_attend)
  return -1;
}
