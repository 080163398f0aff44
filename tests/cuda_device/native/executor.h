// A host thread's means to run blocks: stacks for fibers, shared memory, and the way back out of a failed thread.
#pragma once
#include "block.h"

namespace simt {

constexpr u64 kPage = 4096;
constexpr u64 kSharedBytes = 256 * 1024;
constexpr u32 kMaxThreads = 1024;
// Between arrays in shared memory, to find writes beyond their ends.
constexpr u64 kSharedGap = 64;

struct Executor {
  u8* stacks = nullptr;
  u8* shared = nullptr;
  u8* signal_stack = nullptr;
  u32 prepared = 0;  // fibers whose stacks are mapped
  void* outside = nullptr;  // the stack pointer of whoever runs the launch
  Block block;
  Outcome outcome;

  ~Executor();
  void prepare(u32 threads);
  Fiber* fiber(u32 thread) const { return (Fiber*)(stacks + (thread + 1) * kStackBytes - sizeof(Fiber)); }
};

// Of the launch that this host thread runs; null outside of one.
extern thread_local Executor* running;

// Saves the callee's registers and the stack pointer at `*save`, and goes on where `load` was saved.
extern "C" void simt_switch(void** save, void* load);
// The second half of simt_switch: where a signal handler sends a thread that must not go on.
extern "C" void simt_resume();

}  // namespace simt
