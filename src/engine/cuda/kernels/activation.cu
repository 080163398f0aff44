// activation_<dt>: x [n] of dt in place, n a multiple of 8; kind 0 is GELU by erf, 1 GELU by tanh, 2 ReLU.

#include "common.cuh"

// x * Phi(x), as PyTorch's default.
__device__ __forceinline__ float gelu(float x) {
    float half = 0.5f * x;
    return fma(half, erf_accurate(x * 0.70710678118654752f), half);
}

// x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3).
__device__ __forceinline__ float gelu_tanh(float x) {
    float u2 = 1.5957691216057308f * x * fma(0.044715f * x, x, 1.0f);
    return x / (1.0f + exp_accurate(-u2));
}

// Not fmaxf, which would turn NaN into 0.
__device__ __forceinline__ float relu(float x) {
    return x < 0.0f ? 0.0f : x;
}

template <class T>
__device__ __forceinline__ void activation(T* x, u64 n, u32 kind) {
    u64 stride = (u64)gridDim.x * blockDim.x * 8;
    for (u64 i = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 8; i < n; i += stride) {
        float v[8];
        load_8(v, x + i);
        if (kind == 0) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = gelu(v[j]);
        } else if (kind == 1) {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = gelu_tanh(v[j]);
        } else {
#pragma unroll
            for (int j = 0; j < 8; j++) v[j] = relu(v[j]);
        }
        store_8(x + i, v);
    }
}

#define KERNEL(T, dt)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256) activation_##dt(T* x, u64 n, u32 kind) {                         \
        activation<T>(x, n, kind);                                                                                     \
    }

KERNEL(f16, f16)
KERNEL(bf16, bf16)
KERNEL(float, f32)

#undef KERNEL
