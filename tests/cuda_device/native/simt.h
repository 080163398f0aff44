// What kernel sources see on the software device: CUDA's names for threads and blocks, and the host twin of every
// inline function that common.cuh has for the card. A block's threads are fibers of one host thread (block.h).
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
struct alignas(16) u32x4 {
  u32 x, y, z, w;
};

#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n) alignas(n)
#define __constant__ static const

// Of this header's own loops, whose indices are right.
#define SIMT_UNCHECKED __attribute__((no_sanitize("alignment", "bounds")))

namespace simt {

struct Dim3 {
  u32 x, y, z;
};

struct Block;
struct Warp;

// A copy that cp.async has announced; it takes place at its wait.
struct PendingCopy {
  void* to;
  const void* from;
  u32 group;
};

constexpr u64 kStackBytes = 128 * 1024;
constexpr u32 kMaxPendingCopies = 128;

// One thread of a block. It lies at the upper end of its own stack, which is aligned to its size: this is how a thread
// finds itself from the stack pointer alone.
struct alignas(64) Fiber {
  void* stack_pointer;  // while it does not run
  Block* block;
  Warp* warp;
  u32 lane;
  Dim3 thread;
  u32 copy_groups;  // committed ones
  u32 pending;
  PendingCopy copies[kMaxPendingCopies];
};

inline Fiber* self() {
  u64 stack;
  asm("mov %%rsp, %0" : "=r"(stack));
  return (Fiber*)((stack & ~(kStackBytes - 1)) + kStackBytes - sizeof(Fiber));
}

// What a block's threads share and may read.
struct BlockView {
  Dim3 index, block_dim, grid_dim;
  u8* dynamic_shared;
};
inline const BlockView& view() { return *(const BlockView*)self()->block; }

// Ends the launch with a CUDA error, from within a thread of it.
[[noreturn]] void fail(int code, const char* format, ...) __attribute__((format(printf, 2, 3)));
void barrier(int line);
// All lanes of the warp meet; the last one to come calls `compute` on the operands of all.
void collective(const char* name, int line, void* operand, void (*compute)(void* const* operands));
// The block's memory for one `__shared__` declaration.
void* static_shared(const void* declaration, u64 bytes);
// Fails unless `bytes` bytes at `address` are aligned to their size and are device, pinned or shared memory.
void check_access(const void* address, u32 bytes, const char* what);
void copy_announced(void* shared, const void* global, bool valid);
void copies_committed();
void copies_awaited(u32 groups_left);

template <class T, class Declaration>
inline T& shared_array(Declaration declaration) {
  return *(T*)static_shared(declaration(), sizeof(T));
}

}  // namespace simt

#define threadIdx (simt::self()->thread)
#define blockIdx (simt::view().index)
#define blockDim (simt::view().block_dim)
#define gridDim (simt::view().grid_dim)
#define DYNAMIC_SHARED(name) u8* name = simt::view().dynamic_shared

inline void __syncthreads(int line = __builtin_LINE()) { simt::barrier(line); }

#include "simt_math.h"
#include "simt_warp.h"
