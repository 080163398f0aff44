// Self-test kernels over vectors.
#include "simt.h"

// out[n] = a[n] * factor + b[n]
extern "C" __global__ void __launch_bounds__(256) selftest_axpy(float* out, const float* a, const float* b, float factor, u32 n) {
  u32 i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = fma(a[i], factor, b[i]);
}

// sum[blocks]: of the block's 256 elements of x[256 * blocks].
extern "C" __global__ void __launch_bounds__(256) selftest_block_sum(float* sum, const float* x) {
  __shared__ float partial[256];
  partial[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
  for (u32 half = 128; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) sum[blockIdx.x] = partial[0];
}

// The same with the barrier left out: some order of the threads shows it.
extern "C" __global__ void __launch_bounds__(256) selftest_block_sum_racy(float* sum, const float* x) {
  __shared__ float partial[256];
  partial[threadIdx.x] = x[blockIdx.x * 256 + threadIdx.x];
  for (u32 half = 128; half > 0; half /= 2) {
    if (half != 128) __syncthreads();
    if (threadIdx.x < half) partial[threadIdx.x] += partial[threadIdx.x + half];
  }
  if (threadIdx.x == 0) sum[blockIdx.x] = partial[0];
}
