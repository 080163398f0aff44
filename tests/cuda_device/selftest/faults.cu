// Self-test kernels that do what a card rejects.
#include "simt.h"

// out[index] = value, wherever that is.
extern "C" __global__ void __launch_bounds__(32) selftest_write(float* out, u64 index, float value) {
  if (threadIdx.x == 5) out[index] = value;
}

// 16 bytes from byte `offset` of in[64] on, through the vector accesses (kind 0) or a pointer of the vector's type (1).
extern "C" __global__ void __launch_bounds__(32) selftest_load_16(u32* out, const unsigned char* in, u32 offset, u32 kind) {
  u32x4 value = kind == 0 ? load_16(in + offset) : *(const u32x4*)(in + offset);
  out[threadIdx.x] = value.x + value.y + value.z + value.w;
}

// What a pointer in a buffer points to; it is no argument.
extern "C" __global__ void __launch_bounds__(32) selftest_follow(u32* out, const u64* address) {
  out[threadIdx.x] = load_4((const void*)*address);
}

// kind 0: half a warp shuffles; 1: two barriers at once; 2: a barrier against a warp collective; 3: half a block's warps
// end before a barrier, which is allowed; 4: a lane ends while others shuffle.
extern "C" __global__ void __launch_bounds__(64) selftest_diverge(u32* out, u32 kind) {
  u32 value = threadIdx.x;
  if (kind == 0 && lane_id() < 16) value = shfl_idx_u32(value, 0);
  if (kind == 1) {
    if (threadIdx.x < 32)
      __syncthreads();
    else
      __syncthreads();
  }
  if (kind == 2) {
    if (lane_id() == 3)
      __syncthreads();
    else
      syncwarp();
  }
  if (kind == 3) {
    if (threadIdx.x >= 32) return;
    __syncthreads();
  }
  if (kind == 4) {
    if (lane_id() == 31) return;
    value = shfl_idx_u32(value, 0);
  }
  out[threadIdx.x] = value;
}

// One element beyond a shared array, through a pointer (kind 0) or by its index (1).
extern "C" __global__ void __launch_bounds__(32) selftest_shared_overrun(float* out, u32 index, u32 kind) {
  __shared__ float values[32];
  float* pointer = values;
  if (kind == 0)
    pointer[index] = 1;
  else
    values[index] = 1;
  out[0] = values[0];
}

// Whether dynamic shared memory of `bytes` is there: out[0] is the number of bytes written and read back.
extern "C" __global__ void __launch_bounds__(32) selftest_dynamic_shared(u32* out, u32 bytes) {
  DYNAMIC_SHARED(memory);
  for (u32 i = threadIdx.x; i < bytes; i += 32) memory[i] = (unsigned char)i;
  __syncthreads();
  u32 right = 0;
  for (u32 i = 0; i < bytes; i++) right += memory[i] == (unsigned char)i;
  if (threadIdx.x == 0) out[0] = right;
}

// 40 KB of static shared memory.
extern "C" __global__ void __launch_bounds__(32) selftest_static_shared(float* out) {
  __shared__ float values[10240];
  values[threadIdx.x] = 1;
  out[threadIdx.x] = values[threadIdx.x];
}

// What fresh shared memory holds.
extern "C" __global__ void __launch_bounds__(32) selftest_fresh_shared(u32* out) {
  __shared__ u32 values[32];
  out[blockIdx.x * 32 + threadIdx.x] = values[threadIdx.x];
  values[threadIdx.x] = 7;
}

// A recursion that never ends on a stack that does.
__device__ __attribute__((noinline)) float deeper(float x, u32 depth) {
  float local[256];
  for (u32 i = 0; i < 256; i++) local[i] = x + i;
  float below = depth ? deeper(local[depth % 256], depth - 1) : 0;
  return below + local[(depth + 1) % 256];
}
extern "C" __global__ void __launch_bounds__(32) selftest_stack_overflow(float* out, u32 depth) {
  out[threadIdx.x] = deeper(out[threadIdx.x], depth);
}
