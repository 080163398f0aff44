// LayerNorm, one warp a row: what is normalized is summed in fp32 and stays in registers while mean, variance (about
// the mean) and result are computed, up to 1,024 columns; longer rows are read three times.
//
// embed_layer_norm_<dt>: out [tokens, hidden] = norm(word[id] + token_type[type] + position[place]) of each token
//   word [V, hidden], position [P, hidden], token_type [Y, hidden] of dt; input_ids, token_type_ids and position_ids u32
//   [tokens], in range
// add_layer_norm_<dt>: out [rows, hidden] = norm(x + bias + residual)
//   x, residual [rows, hidden], bias [hidden] of dt; bias and residual may be null; out may be x or residual
// gamma, beta [hidden] fp32; hidden a multiple of 8.

#include "common.cuh"

#define ROWS_PER_BLOCK 4

// One row of the sum of three matrices, a vector being a matrix of one row; null is zero.
template <class T>
struct SumOfRows {
    const T* a;
    const T* b;
    const T* c;
};

// Columns column + 256 i .. column + 256 i + 7 of the sum, zeros past the end. All loads come before the first use.
template <int HELD, class T>
__device__ __forceinline__ void load_sum(float (&x)[HELD][8], const SumOfRows<T>& rows, u32 column, u32 hidden) {
    Eight<T> a[HELD], b[HELD], c[HELD];
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        u32 at = column + 256 * i;
        a[i] = Eight<T>::load(rows.a + at, at < hidden);
        b[i] = Eight<T>::load(rows.b + at, at < hidden && rows.b);
        c[i] = Eight<T>::load(rows.c + at, at < hidden && rows.c);
    }
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        float more[8];
        unpack(x[i], a[i]);
        unpack(more, b[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) x[i][j] += more[j];
        unpack(more, c[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) x[i][j] += more[j];
    }
}

template <int HELD>
__device__ __forceinline__ float sum_of(const float (&x)[HELD][8]) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
#pragma unroll
        for (int j = 0; j < 8; j++) sum += x[i][j];
    }
    return sum;
}

template <int HELD>
__device__ __forceinline__ float squares_about(float mean, const float (&x)[HELD][8], u32 column, u32 hidden) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        if (column + 256 * i < hidden) {
#pragma unroll
            for (int j = 0; j < 8; j++) sum = fma(x[i][j] - mean, x[i][j] - mean, sum);
        }
    }
    return sum;
}

template <int HELD, class T>
__device__ __forceinline__ void store_normalized(T* out, float (&x)[HELD][8], float mean, float scale,
                                                 const float* gamma, const float* beta, u32 column, u32 hidden) {
#pragma unroll
    for (int i = 0; i < HELD; i++) {
        u32 at = column + 256 * i;
        if (at < hidden) {
            float g[8], b[8];
            load_8(g, gamma + at);
            load_8(b, beta + at);
#pragma unroll
            for (int j = 0; j < 8; j++) x[i][j] = fma((x[i][j] - mean) * scale, g[j], b[j]);
            store_8(out + at, x[i]);
        }
    }
}

// Called by all lanes of a warp. `out` may be one of the rows: what a lane reads again, no other writes.
template <class T>
__device__ __forceinline__ void norm_row(T* out, const SumOfRows<T>& rows, const float* gamma, const float* beta,
                                         float eps, u32 hidden) {
    u32 lane = lane_id() * 8;
    float per_column = 1.0f / (float)hidden;
    if (hidden <= 1024) {
        float x[4][8];
        load_sum(x, rows, lane, hidden);
        float mean = warp_sum(sum_of(x)) * per_column;
        float variance = warp_sum(squares_about(mean, x, lane, hidden)) * per_column;
        store_normalized(out, x, mean, rsqrt_accurate(variance + eps), gamma, beta, lane, hidden);
        return;
    }
    float x[1][8];
    float sum = 0.0f;
    for (u32 column = lane; column < hidden; column += 256) {
        load_sum(x, rows, column, hidden);
        sum += sum_of(x);
    }
    float mean = warp_sum(sum) * per_column;
    sum = 0.0f;
    for (u32 column = lane; column < hidden; column += 256) {
        load_sum(x, rows, column, hidden);
        sum += squares_about(mean, x, column, hidden);
    }
    float scale = rsqrt_accurate(warp_sum(sum) * per_column + eps);
    for (u32 column = lane; column < hidden; column += 256) {
        load_sum(x, rows, column, hidden);
        store_normalized(out, x, mean, scale, gamma, beta, column, hidden);
    }
}

template <class T>
__device__ __forceinline__ void embed_layer_norm(T* out, const u32* input_ids, const u32* token_type_ids,
                                                 const u32* position_ids, const T* word, const T* position,
                                                 const T* token_type, const float* gamma, const float* beta, float eps,
                                                 u32 tokens, u32 hidden) {
    u32 token = blockIdx.x * ROWS_PER_BLOCK + threadIdx.x / 32;
    if (token >= tokens) return;
    SumOfRows<T> rows = {word + (u64)input_ids[token] * hidden, token_type + (u64)token_type_ids[token] * hidden,
                         position + (u64)position_ids[token] * hidden};
    norm_row(out + (u64)token * hidden, rows, gamma, beta, eps, hidden);
}

template <class T>
__device__ __forceinline__ void add_layer_norm(T* out, const T* x, const T* bias, const T* residual, const float* gamma,
                                               const float* beta, float eps, u32 rows, u32 hidden) {
    u32 row = blockIdx.x * ROWS_PER_BLOCK + threadIdx.x / 32;
    if (row >= rows) return;
    u64 offset = (u64)row * hidden;
    SumOfRows<T> sum = {x + offset, bias, residual ? residual + offset : nullptr};
    norm_row(out + offset, sum, gamma, beta, eps, hidden);
}

#define KERNELS(T, dt)                                                                                                 \
    extern "C" __global__ void __launch_bounds__(128, 4) embed_layer_norm_##dt(                                        \
        T* out, const u32* input_ids, const u32* token_type_ids, const u32* position_ids, const T* word,               \
        const T* position, const T* token_type, const float* gamma, const float* beta, float eps, u32 tokens,          \
        u32 hidden) {                                                                                                  \
        embed_layer_norm<T>(out, input_ids, token_type_ids, position_ids, word, position, token_type, gamma, beta, eps,\
                            tokens, hidden);                                                                           \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128, 4)                                                               \
        add_layer_norm_##dt(T* out, const T* x, const T* bias, const T* residual, const float* gamma,                  \
                            const float* beta, float eps, u32 rows, u32 hidden) {                                      \
        add_layer_norm<T>(out, x, bias, residual, gamma, beta, eps, rows, hidden);                                     \
    }

KERNELS(f16, f16)
KERNELS(bf16, bf16)
KERNELS(float, f32)

#undef ROWS_PER_BLOCK
#undef KERNELS
