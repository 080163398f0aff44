// Self-attention of packed sequences on tensor cores, fp16 and bf16, with online softmax: scores stay in registers.
//
// attention_<dt>_hd<D>: context [T, hidden] of qkv [T, 3 hidden] (query | key | value, heads of D columns side by
//   side), softmax(query key^T scale) value within each sequence. cu_seqlens [B + 1]: sequence b is the tokens
//   cu_seqlens[b] .. cu_seqlens[b + 1]. Grid (tiles, heads): tiles [tiles, 2] says which sequence and which of its
//   query rows a block starts at, whose 4 warps take 16 or 32 rows each.
// attention_short_<dt>_hd<D>: the same for sequences of up to 64 tokens, one warp per sequence and head, the whole
//   sequence in shared memory. sequences [n] lists them; rows is the longest's length, rounded up to 16.
//
// Shared memory holds rows of D elements in pieces of 16 bytes, whose places within the row are exchanged so that the
// eight rows of an ldmatrix lie in different banks. Rows past the end of a sequence are zeros and are never written.

#include "common.cuh"

#define LOG2_E 1.4426950408889634f

// Where piece `chunk` of a row of D elements lies in shared memory.
template <int D>
__device__ __forceinline__ u32 place(u32 row, u32 chunk) {
    u32 exchange = D == 32 ? (row >> 1) & 3 : row & 7;
    return row * D + ((chunk ^ exchange) * 8);
}

// Copies `rows` rows of D elements to shared memory, `stride` apart in global memory; those from `valid` on become
// zeros. Lane `lane` of `lanes` takes part; they share rows * D / 8 pieces evenly.
template <int D, class T>
__device__ __forceinline__ void copy_rows(T* shared, const T* global, u32 stride, u32 rows, u32 valid, u32 lane,
                                          u32 lanes) {
#pragma unroll
    for (u32 done = 0; done < rows * (D / 8); done += lanes) {
        u32 row = (done + lane) / (D / 8), chunk = (done + lane) % (D / 8);
        bool inside = row < valid;
        cp_async_16(shared + place<D>(row, chunk), global + (inside ? row * stride : 0) + chunk * 8, inside);
    }
}

// Where the row that a lane gives to ldmatrix lies within 16 rows, for columns 16 step .. 16 step + 15: of the A operand
// [16, 16] and of values, whose transpose is two B operands [16, 8]; and of keys, which are two as they are.
template <int D>
__device__ __forceinline__ u32 lane_place(u32 step) {
    return place<D>(lane_id() % 16, 2 * step + lane_id() / 16);
}

template <int D>
__device__ __forceinline__ u32 lane_place_of_keys(u32 step) {
    return place<D>(lane_id() % 8 + lane_id() / 16 * 8, 2 * step + lane_id() / 8 % 2);
}

// The largest and the sum over the four lanes that share a row of an accumulator.
__device__ __forceinline__ float row_max(float x) {
    x = fmaxf(x, shfl_xor_f32(x, 1));
    return fmaxf(x, shfl_xor_f32(x, 2));
}

__device__ __forceinline__ float row_sum(float x) {
    x += shfl_xor_f32(x, 1);
    return x + shfl_xor_f32(x, 2);
}

// Softmax and value sums of 16 rows of queries so far; a lane has two of the rows, eight apart.
template <int D>
struct Sums {
    float out[D / 8][4];
    float max[2];
    float total[2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < D / 8; n++) {
#pragma unroll
            for (int i = 0; i < 4; i++) out[n][i] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            max[i] = negative_infinity();
            total[i] = 0.0f;
        }
    }

    // Scores of KEYS keys become 2^((score - max) * factor), which is e^(...) as factor has log2(e) in it; the sums so
    // far are scaled to the new maximum.
    template <int KEYS>
    __device__ __forceinline__ void softmax(float (&scores)[KEYS / 8][4], float factor) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float now = max[r];
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) now = fmaxf(now, fmaxf(scores[n][2 * r], scores[n][2 * r + 1]));
            now = row_max(now);
            float rescale = exp2_approx((max[r] - now) * factor);
            float shift = now * factor;
            float sum = 0.0f;
#pragma unroll
            for (int n = 0; n < KEYS / 8; n++) {
#pragma unroll
                for (int i = 2 * r; i < 2 * r + 2; i++) {
                    scores[n][i] = exp2_approx(fma(scores[n][i], factor, -shift));
                    sum += scores[n][i];
                }
            }
            max[r] = now;
            total[r] = fma(total[r], rescale, sum);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                out[n][2 * r] *= rescale;
                out[n][2 * r + 1] *= rescale;
            }
        }
    }

    // Writes the weighted means to 16 rows of shared memory.
    template <class T>
    __device__ __forceinline__ void store(T* shared, u32 row) {
        u32 lane = lane_id();
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float scale = 1.0f / row_sum(total[r]);
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                u32 pair = Pair<T>::pack(out[n][2 * r] * scale, out[n][2 * r + 1] * scale);
                *(u32*)(shared + place<D>(row + lane / 4 + 8 * r, n) + lane % 4 * 2) = pair;
            }
        }
    }
};

// The scores of keys past `valid` do not count.
template <int KEYS>
__device__ __forceinline__ void mask(float (&scores)[KEYS / 8][4], u32 valid) {
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (n * 8 + lane_id() % 4 * 2 + i % 2 >= valid) scores[n][i] = negative_infinity();
        }
    }
}

// The A operand of weights of 16 keys, which is how the accumulators of their scores lie.
template <class T, int KEYS>
__device__ __forceinline__ void weights(u32 (&a)[4], const float (&scores)[KEYS / 8][4], u32 step) {
    a[0] = Pair<T>::pack(scores[2 * step][0], scores[2 * step][1]);
    a[1] = Pair<T>::pack(scores[2 * step][2], scores[2 * step][3]);
    a[2] = Pair<T>::pack(scores[2 * step + 1][0], scores[2 * step + 1][1]);
    a[3] = Pair<T>::pack(scores[2 * step + 1][2], scores[2 * step + 1][3]);
}

// Writes `rows` rows of D elements from shared to global memory, 16 bytes a lane.
template <int D, class T>
__device__ __forceinline__ void write_rows(T* global, const T* shared, u32 first, u32 rows, u32 hidden) {
    for (u32 i = lane_id(); i < rows * (D / 8); i += 32) {
        u32 row = i / (D / 8), chunk = i % (D / 8);
        store_16(global + (u64)row * hidden + chunk * 8, *(const u32x4*)(shared + place<D>(first + row, chunk)));
    }
}

// One block of KEYS keys for M times 16 rows of queries. In the last block of a sequence only `valid` keys count, and
// the products of 16 keys without one are left out.
template <class T, int D, int M, int KEYS, bool LAST>
__device__ __forceinline__ void attend(Sums<D> (&sums)[M], const u32 (&query)[M][D / 16][4], const T* keys,
                                       const T* values, float factor, u32 valid) {
    float scores[M][KEYS / 8][4];
    // Addresses of their own for each step, so that only a constant is added to them below.
    const T* lane_keys[D / 16];
#pragma unroll
    for (u32 step = 0; step < D / 16; step++) lane_keys[step] = keys + lane_place_of_keys<D>(step);
#pragma unroll
    for (u32 n = 0; n < KEYS / 16; n++) {
#pragma unroll
        for (int m = 0; m < M; m++) {
#pragma unroll
            for (int i = 0; i < 8; i++) scores[m][2 * n + i / 4][i % 4] = 0.0f;
        }
        if (LAST && n * 16 >= valid) continue;
#pragma unroll
        for (u32 step = 0; step < D / 16; step++) {
            u32 b[4];
            ldmatrix_x4(b, lane_keys[step] + n * 16 * D);
#pragma unroll
            for (int m = 0; m < M; m++) {
                Pair<T>::mma(scores[m][2 * n], query[m][step], {b[0], b[1]});
                Pair<T>::mma(scores[m][2 * n + 1], query[m][step], {b[2], b[3]});
            }
        }
    }
#pragma unroll
    for (int m = 0; m < M; m++) {
        if (LAST) mask<KEYS>(scores[m], valid);
        sums[m].template softmax<KEYS>(scores[m], factor);
    }
    const T* lane_values[D / 16];
#pragma unroll
    for (u32 step = 0; step < D / 16; step++) lane_values[step] = values + lane_place<D>(step);
#pragma unroll
    for (u32 n = 0; n < KEYS / 16; n++) {
        if (LAST && n * 16 >= valid) continue;
        u32 a[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) weights<T, KEYS>(a[m], scores[m], n);
#pragma unroll
        for (u32 step = 0; step < D / 16; step++) {
            u32 b[4];
            ldmatrix_x4_trans(b, lane_values[step] + n * 16 * D);
#pragma unroll
            for (int m = 0; m < M; m++) {
                Pair<T>::mma(sums[m].out[2 * step], a[m], {b[0], b[1]});
                Pair<T>::mma(sums[m].out[2 * step + 1], a[m], {b[2], b[3]});
            }
        }
    }
}

// Shared memory: the tile's queries [64 M, D], then two stages of keys and values [KEYS, D] each.
template <class T, int D, int M, int KEYS>
__device__ __forceinline__ void attention(T* context, const T* qkv, const u32* cu_seqlens, const u32* tiles, u32 hidden,
                                          float scale) {
    DYNAMIC_SHARED(shared);
    T* queries = (T*)shared;
    T* ring = queries + 64 * M * D;
    u32 sequence = tiles[2 * blockIdx.x], first = tiles[2 * blockIdx.x + 1];
    u32 start = cu_seqlens[sequence], length = cu_seqlens[sequence + 1] - start;
    u32 stride = 3 * hidden, column = blockIdx.y * D;
    const T* query = qkv + (u64)(start + first) * stride + column;
    const T* key = qkv + (u64)start * stride + hidden + column;

    copy_rows<D>(queries, query, stride, 64 * M, length - first, threadIdx.x, 128);
    copy_rows<D>(ring, key, stride, KEYS, length, threadIdx.x, 128);
    copy_rows<D>(ring + KEYS * D, key + hidden, stride, KEYS, length, threadIdx.x, 128);
    cp_async_commit();

    // From lane 0, which tells the compiler that a warp's lanes agree about it.
    u32 own = shfl_idx_u32(threadIdx.x / 32, 0) * 16 * M;
    u32 rows = own < length - first ? length - first - own : 0;
    u32 a[M][D / 16][4];
    Sums<D> sums[M];
#pragma unroll
    for (int m = 0; m < M; m++) sums[m].clear();

    u32 stage = 0;
    for (u32 done = 0; done < length; done += KEYS) {
        // Everyone is past the other stage here, so the next keys may come into it while these are worked on.
        cp_async_wait<0>();
        __syncthreads();
        const T* keys = ring + stage * 2 * KEYS * D;
        const T* values = keys + KEYS * D;
        stage ^= 1;
        if (done + KEYS < length) {
            T* next = ring + stage * 2 * KEYS * D;
            const T* from = key + (u64)(done + KEYS) * stride;
            copy_rows<D>(next, from, stride, KEYS, length - done - KEYS, threadIdx.x, 128);
            copy_rows<D>(next + KEYS * D, from + hidden, stride, KEYS, length - done - KEYS, threadIdx.x, 128);
            cp_async_commit();
        }
        if (rows == 0) continue;
        if (done == 0) {
#pragma unroll
            for (int m = 0; m < M; m++) {
#pragma unroll
                for (u32 step = 0; step < D / 16; step++) ldmatrix_x4(a[m][step], queries + (own + 16 * m) * D + lane_place<D>(step));
            }
        }
        if (done + KEYS <= length) {
            attend<T, D, M, KEYS, false>(sums, a, keys, values, scale * LOG2_E, KEYS);
        } else {
            attend<T, D, M, KEYS, true>(sums, a, keys, values, scale * LOG2_E, length - done);
        }
    }
    if (rows == 0) return;

    // Through the place of this warp's own queries, so that 16 bytes at a time are written.
    syncwarp();
#pragma unroll
    for (int m = 0; m < M; m++) sums[m].store(queries, own + 16 * m);
    syncwarp();
    T* out = context + (u64)(start + first + own) * hidden + column;
    write_rows<D>(out, queries, own, rows < 16 * M ? rows : 16 * M, hidden);
}

// Shared memory of each warp: queries, keys and values [rows, D] each.
template <class T, int D>
__device__ __forceinline__ void attention_short(T* context, const T* qkv, const u32* cu_seqlens, const u32* sequences,
                                                u32 n, u32 hidden, u32 heads, u32 rows, float scale) {
    DYNAMIC_SHARED(shared);
    u32 warp = threadIdx.x / 32;
    u32 pair = blockIdx.x * (blockDim.x / 32) + warp;
    if (pair >= n * heads) return;
    T* queries = (T*)shared + warp * 3 * rows * D;
    T* keys = queries + rows * D;
    T* values = keys + rows * D;
    u32 sequence = sequences[pair / heads];
    u32 start = cu_seqlens[sequence], length = cu_seqlens[sequence + 1] - start;
    u32 stride = 3 * hidden, column = pair % heads * D;
    const T* query = qkv + (u64)start * stride + column;
    u32 used = (length + 15) / 16 * 16;

    copy_rows<D>(queries, query, stride, used, length, lane_id(), 32);
    copy_rows<D>(keys, query + hidden, stride, used, length, lane_id(), 32);
    copy_rows<D>(values, query + 2 * hidden, stride, used, length, lane_id(), 32);
    cp_async_commit();
    cp_async_wait<0>();
    syncwarp();

    for (u32 row = 0; row < length; row += 16) {
        u32 a[1][D / 16][4];
#pragma unroll
        for (u32 step = 0; step < D / 16; step++) ldmatrix_x4(a[0][step], queries + row * D + lane_place<D>(step));
        Sums<D> sums[1];
        sums[0].clear();
        attend<T, D, 1, 64, true>(sums, a, keys, values, scale * LOG2_E, length);
        syncwarp();
        sums[0].store(queries, row);
    }
    syncwarp();
    write_rows<D>(context + (u64)start * hidden + column, queries, 0, length, hidden);
}

#define KERNELS(T, dt, D, M, KEYS)                                                                                     \
    extern "C" __global__ void __launch_bounds__(128, 2) attention_##dt##_hd##D(                                       \
        T* context, const T* qkv, const u32* cu_seqlens, const u32* tiles, u32 hidden, float scale) {                  \
        attention<T, D, M, KEYS>(context, qkv, cu_seqlens, tiles, hidden, scale);                                      \
    }                                                                                                                  \
    extern "C" __global__ void __launch_bounds__(128, 2)                                                               \
        attention_short_##dt##_hd##D(T* context, const T* qkv, const u32* cu_seqlens, const u32* sequences, u32 n,     \
                                     u32 hidden, u32 heads, u32 rows, float scale) {                                   \
        attention_short<T, D>(context, qkv, cu_seqlens, sequences, n, hidden, heads, rows, scale);                     \
    }

KERNELS(f16, f16, 32, 2, 64)
KERNELS(f16, f16, 64, 2, 64)
KERNELS(f16, f16, 128, 1, 32)
KERNELS(bf16, bf16, 32, 2, 64)
KERNELS(bf16, bf16, 64, 2, 64)
KERNELS(bf16, bf16, 128, 1, 32)

#undef LOG2_E
#undef KERNELS
