// attention_f32_hd<D>: what attention_<dt>_hd<D> does, in fp32 without tensor cores. A block takes 32 query rows of one
//   sequence
// and head, a warp 8 of them. Scores of 32 keys at a time: a lane has one key's, and for the values D / 32 columns.

#include "common.cuh"

#define KEYS 32
#define ROWS 8

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x = fmaxf(x, shfl_xor_f32(x, mask));
    return x;
}

// queries [32, D]; keys [KEYS, D + 4], whose rows so start in different banks; weights [4, ROWS, KEYS], a part per
// warp.
template <int D>
__device__ __forceinline__ void attention_f32(float* context, const float* qkv, const u32* cu_seqlens, const u32* tiles,
                                              u32 hidden, float scale, float* queries, float* keys, float* weights) {
    u32 sequence = tiles[2 * blockIdx.x], first = tiles[2 * blockIdx.x + 1];
    u32 start = cu_seqlens[sequence], length = cu_seqlens[sequence + 1] - start;
    u32 stride = 3 * hidden, lane = lane_id(), warp = threadIdx.x / 32;
    const float* query = qkv + (u64)(start + first) * stride + blockIdx.y * D;
    const float* key = qkv + (u64)start * stride + hidden + blockIdx.y * D;

    for (u32 i = threadIdx.x; i < 4 * ROWS * (D / 4); i += 128) {
        u32 row = i / (D / 4), column = i % (D / 4) * 4;
        u32x4 piece = {0, 0, 0, 0};
        if (first + row < length) piece = load_16(query + (u64)row * stride + column);
        *(u32x4*)(queries + row * D + column) = piece;
    }

    float max[ROWS], total[ROWS], out[ROWS][D / 32];
#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        max[r] = negative_infinity();
        total[r] = 0.0f;
#pragma unroll
        for (int c = 0; c < D / 32; c++) out[r][c] = 0.0f;
    }
    const float* own = queries + warp * ROWS * D;
    float* weight = weights + warp * ROWS * KEYS;

    for (u32 done = 0; done < length; done += KEYS) {
        __syncthreads();
        for (u32 i = threadIdx.x; i < KEYS * (D / 4); i += 128) {
            u32 row = i / (D / 4), column = i % (D / 4) * 4;
            u32x4 piece = {0, 0, 0, 0};
            if (done + row < length) piece = load_16(key + (u64)(done + row) * stride + column);
            *(u32x4*)(keys + row * (D + 4) + column) = piece;
        }
        __syncthreads();

        float scores[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; r++) scores[r] = 0.0f;
        for (u32 column = 0; column < D; column += 4) {
            u32x4 k = *(const u32x4*)(keys + lane * (D + 4) + column);
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                u32x4 q = *(const u32x4*)(own + r * D + column);
                scores[r] = fma(word_to_f32(q.x), word_to_f32(k.x), scores[r]);
                scores[r] = fma(word_to_f32(q.y), word_to_f32(k.y), scores[r]);
                scores[r] = fma(word_to_f32(q.z), word_to_f32(k.z), scores[r]);
                scores[r] = fma(word_to_f32(q.w), word_to_f32(k.w), scores[r]);
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; r++) {
            float score = done + lane < length ? scores[r] * scale : negative_infinity();
            float now = fmaxf(max[r], warp_max(score));
            float rescale = exp_accurate(max[r] - now);
            float e = exp_accurate(score - now);
            total[r] = fma(total[r], rescale, e);
            max[r] = now;
#pragma unroll
            for (int c = 0; c < D / 32; c++) out[r][c] *= rescale;
            weight[r * KEYS + lane] = e;
        }
        syncwarp();
        u32 valid = length - done < KEYS ? length - done : KEYS;
        const float* value = key + hidden + (u64)done * stride + lane;
        for (u32 k = 0; k < valid; k++) {
            float v[D / 32];
#pragma unroll
            for (int c = 0; c < D / 32; c++) v[c] = value[(u64)k * stride + 32 * c];
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
#pragma unroll
                for (int c = 0; c < D / 32; c++) out[r][c] = fma(weight[r * KEYS + k], v[c], out[r][c]);
            }
        }
        syncwarp();
    }

#pragma unroll
    for (int r = 0; r < ROWS; r++) {
        u32 row = first + warp * ROWS + r;
        float all = warp_sum(total[r]);
        if (row < length) {
#pragma unroll
            for (int c = 0; c < D / 32; c++) {
                context[(u64)(start + row) * hidden + blockIdx.y * D + 32 * c + lane] = out[r][c] / all;
            }
        }
    }
}

#define KERNEL(D)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(128, 2)                                                               \
        attention_f32_hd##D(float* context, const float* qkv, const u32* cu_seqlens, const u32* tiles, u32 hidden,     \
                            float scale) {                                                                             \
        __shared__ u32x4 queries[ROWS * D];                                                                            \
        __shared__ u32x4 keys[KEYS * (D / 4 + 1)];                                                                     \
        __shared__ float weights[4 * ROWS * KEYS];                                                                     \
        attention_f32<D>(context, qkv, cu_seqlens, tiles, hidden, scale, (float*)queries, (float*)keys, weights);      \
    }

KERNEL(32)
KERNEL(64)
KERNEL(128)

#undef KEYS
#undef ROWS
#undef KERNEL
