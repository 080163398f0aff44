// classify_<dt>: the classifier's logits and probabilities in fp32, one block a row.
//   row i: logits = weight tanh(pooled[i]) + bias, to the device address logits_address[i], and their activation to
//   probabilities_address[i]; each [classes], a multiple of 4, or 0 for not wanted. Of a row without either nothing is
//   read. pooled [n, hidden] (before tanh), weight [classes, hidden], bias [classes] of dt.
//   activation 0 is softmax, 1 sigmoid, 2 identity. *not_finite becomes 1 when something of pooled, or a
//   result, is not finite.
// hidden is a multiple of 8. Shared memory: the row after tanh, fp32 [hidden].

#include "common.cuh"

#define WARPS 8

#define SOFTMAX 0
#define SIGMOID 1

// The sum or the maximum over the block, the same in each thread; scratch [WARPS].
template <bool MAX>
__device__ __forceinline__ float over_block(float x, float* scratch) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) {
        float other = shfl_xor_f32(x, mask);
        x = MAX ? fmaxf(x, other) : x + other;
    }
    __syncthreads();
    if (lane_id() == 0) scratch[threadIdx.x / 32] = x;
    __syncthreads();
    x = scratch[0];
#pragma unroll
    for (int w = 1; w < WARPS; w++) x = MAX ? fmaxf(x, scratch[w]) : x + scratch[w];
    return x;
}

template <class T>
__device__ __forceinline__ void classify(const u64* logits_address, const u64* probabilities_address, const T* pooled,
                                         const T* weight, const T* bias, u32 n, u32 classes, u32 hidden, u32 activation,
                                         u32* not_finite, float* scratch) {
    DYNAMIC_SHARED(shared);
    float* row = (float*)shared;
    if (blockIdx.x >= n) return;
    float* logits = (float*)logits_address[blockIdx.x];
    float* probabilities = (float*)probabilities_address[blockIdx.x];
    if (!logits && !probabilities) return;
    bool good = true;

    for (u32 column = threadIdx.x * 8; column < hidden; column += WARPS * 256) {
        float x[8];
        load_8(x, pooled + (u64)blockIdx.x * hidden + column);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            // Here, as tanh makes 1 of infinity.
            good = good && finite(x[i]);
            row[column + i] = tanh_accurate(x[i]);
        }
    }
    __syncthreads();

    // The probabilities' place holds the logits until all are known.
    for (u32 c = threadIdx.x / 32; c < classes; c += WARPS) {
        float sum = 0.0f;
        for (u32 column = lane_id() * 8; column < hidden; column += 256) {
            float w[8];
            load_8(w, weight + (u64)c * hidden + column);
#pragma unroll
            for (int i = 0; i < 8; i++) sum = fma(w[i], row[column + i], sum);
        }
        float logit = warp_sum(sum) + to_f32(bias[c]);
        good = good && finite(logit);
        if (lane_id() == 0) {
            if (logits) logits[c] = logit;
            if (probabilities) probabilities[c] = logit;
        }
    }
    if (probabilities && activation == SOFTMAX) {
        __syncthreads();
        float max = negative_infinity();
        for (u32 c = threadIdx.x; c < classes; c += WARPS * 32) max = fmaxf(max, probabilities[c]);
        max = over_block<true>(max, scratch);
        float sum = 0.0f;
        for (u32 c = threadIdx.x; c < classes; c += WARPS * 32) sum += exp_accurate(probabilities[c] - max);
        sum = over_block<false>(sum, scratch);
        for (u32 c = threadIdx.x; c < classes; c += WARPS * 32) {
            float p = exp_accurate(probabilities[c] - max) / sum;
            good = good && finite(p);
            probabilities[c] = p;
        }
    } else if (probabilities && activation == SIGMOID) {
        __syncthreads();
        for (u32 c = threadIdx.x; c < classes; c += WARPS * 32) {
            probabilities[c] = 1.0f / (1.0f + exp_accurate(-probabilities[c]));
        }
    }
    if (!good) atomic_or_u32(not_finite, 1);
}

#define KERNEL(T, dt)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                               \
        classify_##dt(const u64* logits_address, const u64* probabilities_address, const T* pooled, const T* weight,   \
                      const T* bias, u32 n, u32 classes, u32 hidden, u32 activation, u32* not_finite) {                \
        __shared__ float scratch[WARPS];                                                                               \
        classify<T>(logits_address, probabilities_address, pooled, weight, bias, n, classes, hidden, activation,       \
                    not_finite, scratch);                                                                              \
    }

KERNEL(f16, f16)
KERNEL(bf16, bf16)
KERNEL(float, f32)

#undef WARPS
#undef SOFTMAX
#undef SIGMOID
#undef KERNEL
