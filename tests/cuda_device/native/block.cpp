// The threads of a block: who runs next, barriers, warp collectives, shared memory.
#include "block.h"

#include <signal.h>
#include <stdio.h>
#include <string.h>

#include <algorithm>
#include <vector>

#include "executor.h"
#include "memory.h"

namespace simt {

static u64 next_random(u64& state) {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return state;
}

static u32 nth_bit(u32 mask, u32 n) {
  while (n--) mask &= mask - 1;
  return __builtin_ctz(mask);
}

// The bit of `mask` that follows `current` in the order, wrapping around. `current` may be -1 or 32: from the start.
static u32 following(u32 mask, int current, Order order, u64& random) {
  if (order == Order::kRandom) return nth_bit(mask, next_random(random) % __builtin_popcount(mask));
  if (order == Order::kForward) {
    u32 above = current >= 31 ? 0 : mask & (~0u << (current + 1));
    return __builtin_ctz(above ? above : mask);
  }
  u32 below = current <= 0 ? 0 : mask & (~0u >> (32 - current));
  return 31 - __builtin_clz(below ? below : mask);
}

static void set_ready(Block& block, Warp& warp, u32 lanes) {
  warp.ready |= lanes;
  if (lanes) block.ready_warps |= 1u << (&warp - block.warps);
}

static void set_waiting(Block& block, Warp& warp, u32 lane) {
  warp.ready &= ~(1u << lane);
  if (!warp.ready) block.ready_warps &= ~(1u << (&warp - block.warps));
}

// From a thread that waits or has ended to one that can run.
static void switch_from(Fiber* fiber) {
  Block& block = *fiber->block;
  Order order = block.order;
  if (!block.ready_warps) {
    u32 in_collectives = 0;
    const Warp* example = nullptr;
    for (u32 i = 0; i < block.warp_count; i++)
      if (block.warps[i].arrived) {
        example = &block.warps[i];
        in_collectives += __builtin_popcount(example->arrived);
      }
    if (example)
      fail(719, "deadlock: %u threads wait at a barrier, %u in warp collectives (%s of line %d, lanes 0x%08x), %u have ended",
           block.at_barrier, in_collectives, example->collective, example->line, example->arrived, block.ended);
    fail(719, "deadlock: %u threads wait at a barrier, %u have ended", block.at_barrier, block.ended);
  }
  int own = (int)(fiber->warp - block.warps);
  bool stay = fiber->warp->ready && (order != Order::kRandom || next_random(block.random) % 4);
  u32 warp = stay ? own : following(block.ready_warps, own, order, block.random);
  int from = (int)warp == own ? (int)fiber->lane : order == Order::kReverse ? 32 : -1;
  u32 lane = following(block.warps[warp].ready, from, order, block.random);
  Fiber* next = block.executor->fiber(warp * 32 + lane);
  if (next != fiber) simt_switch(&fiber->stack_pointer, next->stack_pointer);
}

static void release_barrier(Block& block) {
  block.at_barrier = 0;
  for (u32 i = 0; i < block.warp_count; i++)
    set_ready(block, block.warps[i], block.warps[i].present & ~block.warps[i].ended);
}

void barrier(int line) {
  Fiber* fiber = self();
  Block& block = *fiber->block;
  if (block.at_barrier && block.barrier_line != line)
    fail(719, "__syncthreads of line %d while other threads wait at the one of line %d", line, block.barrier_line);
  block.barrier_line = line;
  set_waiting(block, *fiber->warp, fiber->lane);
  if (++block.at_barrier + block.ended == block.threads) release_barrier(block);
  switch_from(fiber);
}

void collective(const char* name, int line, void* operand, void (*compute)(void* const*)) {
  Fiber* fiber = self();
  Warp& warp = *fiber->warp;
  if (warp.present != ~0u || warp.ended)
    fail(719, "%s of line %d in a warp of which not all 32 lanes are there (present 0x%08x, ended 0x%08x)", name, line,
         warp.present, warp.ended);
  if (!warp.arrived) {
    warp.collective = name;
    warp.line = line;
  } else if (warp.line != line || (warp.collective != name && strcmp(warp.collective, name))) {
    fail(719, "%s of line %d while other lanes of the warp wait in %s of line %d", name, line, warp.collective,
         warp.line);
  }
  warp.operands[fiber->lane] = operand;
  warp.arrived |= 1u << fiber->lane;
  set_waiting(*fiber->block, warp, fiber->lane);
  if (warp.arrived == ~0u) {
    compute(warp.operands);
    warp.arrived = 0;
    set_ready(*fiber->block, warp, ~0u);
  }
  switch_from(fiber);
}

static void end_thread(Fiber* fiber) {
  Block& block = *fiber->block;
  Warp& warp = *fiber->warp;
  if (warp.arrived)
    fail(719, "ends while other lanes of the warp wait in %s of line %d", warp.collective, warp.line);
  warp.ended |= 1u << fiber->lane;
  set_waiting(block, warp, fiber->lane);
  block.ended++;
  if (block.ended == block.threads) simt_switch(&fiber->stack_pointer, block.executor->outside);
  if (block.at_barrier && block.at_barrier + block.ended == block.threads) release_barrier(block);
  switch_from(fiber);
}

static void thread_main() {
  Fiber* fiber = self();
  fiber->block->kernel->run(fiber->block->arguments);
  end_thread(fiber);
  __builtin_trap();
}

void* static_shared(const void* declaration, u64 bytes) {
  Block& block = *self()->block;
  for (u32 i = 0; i < block.shared_arrays; i++)
    if (block.shared[i].declaration == declaration) return block.shared[i].address;
  if (block.shared_arrays == kMaxSharedArrays) fail(719, "more than %u __shared__ arrays", kMaxSharedArrays);
  u8* memory = block.executor->shared;
  u64 dynamic = memory + kSharedBytes - block.dynamic_shared;
  u64 padded = (bytes + 15) & ~15ull;
  block.static_bytes += padded;
  if (block.static_bytes > 48 * 1024)
    fail(1, "%llu bytes of static shared memory, more than 49152", block.static_bytes);
  if (block.static_bytes + dynamic > block.shared_limit)
    fail(1, "%llu bytes of static and %llu of dynamic shared memory, more than %llu together", block.static_bytes,
         dynamic, block.shared_limit);
  SharedArray& array = block.shared[block.shared_arrays];
  array.declaration = declaration;
  array.bytes = bytes;
  array.address = memory + kSharedGap;
  if (block.shared_arrays) {
    const SharedArray& last = block.shared[block.shared_arrays - 1];
    array.address = last.address + ((last.bytes + 15) & ~15ull) + kSharedGap;
  }
  block.shared_arrays++;
  memset(array.address - kSharedGap, 0xff, kSharedGap + padded + kSharedGap);
  return array.address;
}

static bool all_poison(const u8* from, const u8* to) {
  return std::all_of(from, to, [](u8 byte) { return byte == 0xff; });
}

// Whether something was written between or beyond the arrays of shared memory.
static void check_shared(Executor& executor) {
  Block& block = executor.block;
  for (u32 i = 0; i < block.shared_arrays; i++) {
    const SharedArray& array = block.shared[i];
    const u8* end = array.address + array.bytes;
    const u8* gap_end = (const u8*)(((u64)end + 15) & ~15ull) + kSharedGap;
    if (all_poison(array.address - kSharedGap, array.address) && all_poison(end, gap_end)) continue;
    executor.outcome.code = 700;
    executor.outcome.message = std::string(block.kernel->name) + ": a write beyond a __shared__ array of " +
                               std::to_string(array.bytes) + " bytes";
    return;
  }
}

void check_access(const void* address, u32 bytes, const char* what) {
  u64 at = (u64)address;
  if (at % bytes) fail(716, "%s at address 0x%llx, which is not a multiple of %u", what, at, bytes);
  bool is_shared = at - (u64)self()->block->executor->shared < kSharedBytes;
  if (!is_shared && !device::in_reservation(at))
    fail(700, "%s at address 0x%llx, which is no memory of the device", what, at);
}

void copy_announced(void* shared, const void* global, bool valid) {
  Fiber* fiber = self();
  check_access(shared, 16, "cp.async to");
  if ((u64)shared - (u64)fiber->block->executor->shared >= kSharedBytes) fail(700, "cp.async to what is not shared memory");
  if (valid) check_access(global, 16, "cp.async from");
  if (fiber->pending == kMaxPendingCopies) fail(719, "more than %u cp.async before a wait", kMaxPendingCopies);
  fiber->copies[fiber->pending++] = {shared, valid ? global : nullptr, fiber->copy_groups};
  // Nobody may read this memory until the wait: neither what was there before nor what comes.
  if (fiber->block->poison) memset(shared, 0xff, 16);
}

void copies_committed() { self()->copy_groups++; }

void copies_awaited(u32 groups_left) {
  Fiber* fiber = self();
  u32 kept = 0;
  for (u32 i = 0; i < fiber->pending; i++) {
    const PendingCopy& copy = fiber->copies[i];
    if (copy.group + groups_left >= fiber->copy_groups) {
      fiber->copies[kept++] = copy;
    } else if (copy.from) {
      memcpy(copy.to, copy.from, 16);
    } else {
      memset(copy.to, 0, 16);
    }
  }
  fiber->pending = kept;
}

static void run_block(Executor& executor, const Launch& launch, Dim3 index, u64 random) {
  Block& block = executor.block;
  memset((void*)block.warps, 0, sizeof(Warp) * block.warp_count);
  block.index = index;
  block.ready_warps = block.at_barrier = block.ended = 0;
  block.random = random | 1;
  block.static_bytes = block.shared_arrays = 0;
  if (launch.poison) memset(block.dynamic_shared, 0xff, executor.shared + kSharedBytes - block.dynamic_shared);
  Dim3 thread = {0, 0, 0};
  for (u32 i = 0; i < block.threads; i++) {
    Fiber* fiber = executor.fiber(i);
    fiber->block = &block;
    fiber->warp = &block.warps[i / 32];
    fiber->lane = i % 32;
    fiber->thread = thread;
    fiber->copy_groups = fiber->pending = 0;
    fiber->warp->present |= 1u << fiber->lane;
    // What simt_resume takes: six registers and the address; the stack as it is when a function starts.
    void** top = (void**)fiber - 1;
    *--top = (void*)thread_main;
    top -= 6;
    memset(top, 0, 6 * sizeof *top);
    fiber->stack_pointer = top;
    if (++thread.x == launch.block.x) {
      thread.x = 0;
      if (++thread.y == launch.block.y) {
        thread.y = 0;
        thread.z++;
      }
    }
  }
  for (u32 i = 0; i < block.warp_count; i++) set_ready(block, block.warps[i], block.warps[i].present);
  bool reverse = launch.order == Order::kReverse;
  u32 warp = following(block.ready_warps, reverse ? 32 : -1, launch.order, block.random);
  u32 lane = following(block.warps[warp].ready, reverse ? 32 : -1, launch.order, block.random);
  simt_switch(&executor.outside, executor.fiber(warp * 32 + lane)->stack_pointer);
  if (!executor.outcome.code) check_shared(executor);
}

Outcome run(const Launch& launch) {
  static thread_local Executor own;
  Executor& executor = own;
  u32 threads = launch.block.x * launch.block.y * launch.block.z;
  executor.prepare(threads);
  executor.outcome = Outcome();
  Block& block = executor.block;
  block.executor = &executor;
  block.order = launch.order;
  block.poison = launch.poison;
  block.kernel = launch.kernel;
  block.arguments = launch.arguments;
  block.threads = threads;
  block.warp_count = (threads + 31) / 32;
  block.block_dim = launch.block;
  block.grid_dim = launch.grid;
  block.shared_limit = launch.shared_limit;
  // At the very end: what lies beyond is a guard page.
  block.dynamic_shared = executor.shared + kSharedBytes - ((launch.dynamic_shared + 15) & ~15u);

  stack_t stack = {}, before = {};
  stack.ss_sp = executor.signal_stack;
  stack.ss_size = 64 * 1024;
  sigaltstack(&stack, &before);
  running = &executor;
  u64 blocks = (u64)launch.grid.x * launch.grid.y * launch.grid.z;
  u64 random = launch.seed * 0x9e3779b97f4a7c15ull + 1;
  std::vector<u32> shuffled;
  if (launch.order == Order::kRandom) {
    shuffled.resize(blocks);
    for (u64 i = 0; i < blocks; i++) {
      u64 other = next_random(random) % (i + 1);
      shuffled[i] = shuffled[other];
      shuffled[other] = (u32)i;
    }
  }
  for (u64 i = 0; i < blocks && !executor.outcome.code; i++) {
    u64 number = launch.order == Order::kForward ? i : launch.order == Order::kReverse ? blocks - 1 - i : shuffled[i];
    Dim3 index = {(u32)(number % launch.grid.x), (u32)(number / launch.grid.x % launch.grid.y),
                  (u32)(number / launch.grid.x / launch.grid.y)};
    run_block(executor, launch, index, next_random(random));
  }
  running = nullptr;
  sigaltstack(&before, nullptr);
  executor.outcome.static_shared = block.static_bytes;
  return executor.outcome;
}

}  // namespace simt
