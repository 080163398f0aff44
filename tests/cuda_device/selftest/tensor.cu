// Self-test kernels for warp primitives, tensor core fragments and asynchronous copies.
#include "simt.h"

// d [16, 8] = a [16, 16] b [8, 16]^T, one warp: fragments through ldmatrix from shared memory.
template <void (*multiply)(float (&)[4], const u32 (&)[4], const u32 (&)[2], int)>
__device__ void product(float* d, const u16* a, const u16* b) {
  __shared__ u16 tile_a[16 * 16];
  __shared__ u16 tile_b[8 * 16];
  u32 lane = lane_id();
  store_16(tile_a + lane * 8, load_16(a + lane * 8));
  if (lane < 16) store_16(tile_b + lane * 8, load_16(b + lane * 8));
  __syncthreads();
  u32 fragment_a[4], fragment_b[4];
  ldmatrix_x4(fragment_a, tile_a + (lane % 16) * 16 + (lane / 16) * 8);
  // Only two matrices are wanted; the other two are read again.
  ldmatrix_x4(fragment_b, tile_b + (lane % 8) * 16 + (lane / 8 % 2) * 8);
  float sums[4] = {0, 0, 0, 0};
  u32 pair[2] = {fragment_b[0], fragment_b[1]};
  multiply(sums, fragment_a, pair, 0);
  for (u32 i = 0; i < 4; i++) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sums[i];
}
extern "C" __global__ void __launch_bounds__(32) selftest_mma_f16(float* d, const u16* a, const u16* b) {
  product<mma_m16n8k16_f16>(d, a, b);
}
extern "C" __global__ void __launch_bounds__(32) selftest_mma_bf16(float* d, const u16* a, const u16* b) {
  product<mma_m16n8k16_bf16>(d, a, b);
}

// out [8, 8] = in [8, 8]^T of 16-bit values, by ldmatrix.trans.
extern "C" __global__ void __launch_bounds__(32) selftest_transpose(u16* out, const u16* in) {
  __shared__ u16 tile[64];
  u32 lane = lane_id();
  if (lane < 8) store_16(tile + lane * 8, load_16(in + lane * 8));
  syncwarp();
  u32 fragment[4];
  ldmatrix_x4_trans(fragment, tile + lane % 8 * 8);
  store_4(out + lane / 4 * 8 + lane % 4 * 2, fragment[0]);
}

// The sum of a warp's values, by exchanges; each lane gets it.
extern "C" __global__ void __launch_bounds__(64) selftest_warp_sum(float* out, const float* in) {
  float sum = in[threadIdx.x];
  for (int mask = 16; mask > 0; mask /= 2) sum += shfl_xor_f32(sum, mask);
  out[threadIdx.x] = sum;
}

// out[128] = in[128] through shared memory by cp.async, of which the last 32 are not valid; `wait` and `barrier`: whether
// the kernel waits for the copies, and all threads for each other.
extern "C" __global__ void __launch_bounds__(32) selftest_async_copy(u32* out, const u32* in, u32 wait, u32 barrier) {
  __shared__ u32 tile[128];
  u32 i = threadIdx.x;
  cp_async_16(tile + i * 4, in + i * 4, i < 24);
  cp_async_commit();
  cp_async_commit();
  if (wait) cp_async_wait<1>();
  if (barrier) __syncthreads();
  for (u32 j = 0; j < 4; j++) out[j * 32 + i] = tile[j * 32 + (i ^ 31)];
}
