// pool_<dt>: one fp32 row of [hidden] a sequence, one block each.
//   row i goes to the device address out_address[i] (a multiple of 4) and is made of sequence[i]: of hidden_states [T,
//   hidden] of dt the tokens cu_seqlens[s] .. cu_seqlens[s + 1], at least one.
//   mode 0 is the mean, 1 the first token, 2 the maximum of each column, 3 the last token; normalize scales the row to
//   length 1. *not_finite becomes 1 when something that is read, or the row, is not finite.
// hidden is a multiple of 8. Warps take turns with the tokens and lanes with 8 columns each.

#include "common.cuh"

#define WARPS 8
#define COLUMNS 256
// Where column i of a lane's eight is in shared memory: in different banks both when the lanes write one column each and
// when columns are read in order.
#define PLACE(i, lane) ((i) * 36 + (lane))
#define PLACES (8 * 36)

#define MEAN 0
#define CLS 1
#define MAX 2
#define LAST 3

template <class T>
__device__ __forceinline__ void pool(const u64* out_address, const u32* sequence, const T* hidden_states,
                                     const u32* cu_seqlens, u32 n, u32 hidden, u32 mode, u32 normalize, u32* not_finite,
                                     float* parts, double* squares) {
    if (blockIdx.x >= n) return;
    float* out = (float*)out_address[blockIdx.x];
    u32 from = cu_seqlens[sequence[blockIdx.x]], to = cu_seqlens[sequence[blockIdx.x] + 1];
    if (mode == CLS) to = from + 1;
    if (mode == LAST) from = to - 1;
    float scale = mode == MEAN ? 1.0f / (float)(to - from) : 1.0f;
    u32 warp = threadIdx.x / 32;
    bool good = true;
    double square = 0.0;

    for (u32 base = 0; base < hidden; base += COLUMNS) {
        u32 column = base + lane_id() * 8;
        float x[8];
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = mode == MAX ? negative_infinity() : 0.0f;
        if (column < hidden) {
            for (u32 token = from + warp; token < to; token += WARPS) {
                float y[8];
                load_8(y, hidden_states + (u64)token * hidden + column);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    good = good && finite(y[i]);
                    x[i] = mode == MAX ? fmaxf(x[i], y[i]) : x[i] + y[i];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 8; i++) parts[warp * PLACES + PLACE(i, lane_id())] = x[i];
        __syncthreads();
        column = base + threadIdx.x;
        if (column < hidden) {
            u32 slot = PLACE(threadIdx.x % 8, threadIdx.x / 8);
            float y = parts[slot];
#pragma unroll
            for (int w = 1; w < WARPS; w++) {
                float more = parts[w * PLACES + slot];
                y = mode == MAX ? fmaxf(y, more) : y + more;
            }
            y *= scale;
            good = good && finite(y);
            square += (double)y * (double)y;
            out[column] = y;
        }
        __syncthreads();
    }

    if (normalize) {
        squares[threadIdx.x] = square;
        __syncthreads();
        for (u32 half = WARPS * 16; half > 0; half /= 2) {
            if (threadIdx.x < half) squares[threadIdx.x] += squares[threadIdx.x + half];
            __syncthreads();
        }
        // In double, so that no finite row is too long or too short; a zero row stays zero.
        double length = sqrt_f64(squares[0]);
        float factor = (float)(1.0 / (length > 1e-12 ? length : 1e-12));
        for (u32 column = threadIdx.x; column < hidden; column += COLUMNS) out[column] *= factor;
    }
    if (!good) atomic_or_u32(not_finite, 1);
}

#define KERNEL(T, dt)                                                                                                  \
    extern "C" __global__ void __launch_bounds__(256, 2)                                                               \
        pool_##dt(const u64* out_address, const u32* sequence, const T* hidden_states, const u32* cu_seqlens, u32 n,   \
                  u32 hidden, u32 mode, u32 normalize, u32* not_finite) {                                              \
        __shared__ float parts[WARPS * PLACES];                                                                        \
        __shared__ double squares[COLUMNS];                                                                            \
        pool<T>(out_address, sequence, hidden_states, cu_seqlens, n, hidden, mode, normalize, not_finite, parts,       \
                squares);                                                                                              \
    }

KERNEL(f16, f16)
KERNEL(bf16, bf16)
KERNEL(float, f32)

#undef WARPS
#undef COLUMNS
#undef PLACE
#undef PLACES
#undef MEAN
#undef CLS
#undef MAX
#undef LAST
#undef KERNEL
