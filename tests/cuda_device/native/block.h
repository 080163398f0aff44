// Runs the blocks of one launch, one after the other, on the calling host thread.
//
// A thread of a block is a fiber; a fiber runs until it waits for others (barrier, warp collective) or ends, and the
// next one is chosen by the thread order under test. What cannot go on is reported as the hardware would report it.
#pragma once
#include <string>

#include "kernel_table.h"
#include "simt.h"

namespace simt {

struct Warp {
  u32 present;  // lanes that exist
  u32 ready;    // lanes that can run
  u32 arrived;  // lanes that wait in the collective
  u32 ended;
  const char* collective;
  int line;
  void* operands[32];
};

struct SharedArray {
  const void* declaration;
  u8* address;
  u64 bytes;
};

constexpr u32 kMaxWarps = 32;
constexpr u32 kMaxSharedArrays = 64;

struct Executor;

enum class Order { kForward, kReverse, kRandom };

struct Block : BlockView {
  Executor* executor;
  Order order;
  bool poison;
  const Kernel* kernel;
  void* const* arguments;
  u32 threads, warp_count;
  u32 ready_warps;  // those with a lane that can run
  u32 at_barrier, ended;
  int barrier_line;
  u64 random;
  u64 static_bytes, shared_limit;
  u32 shared_arrays;
  Warp warps[kMaxWarps];
  SharedArray shared[kMaxSharedArrays];
};

struct Launch {
  const Kernel* kernel;
  Dim3 grid, block;
  u32 dynamic_shared;
  u64 shared_limit;  // static and dynamic together
  Order order;
  u64 seed;
  bool poison;
  void* const* arguments;
};

struct Outcome {
  int code = 0;  // a CUresult
  std::string message;
  u64 static_shared = 0;
};

Outcome run(const Launch& launch);

// Turns faults of a kernel's threads into errors of its launch; other faults go where they went before.
void install_fault_handler();

}  // namespace simt
