// What every kernel uses. All PTX is here, one instruction a function; the software device of the tests brings a host
// twin of each in simt.h, so a kernel file is plain C++ on both sides. No other header is needed: 16-bit floats travel
// as their bits.

#pragma once

#ifdef SOFTWARE_DEVICE
#include "simt.h"
#else

typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DYNAMIC_SHARED(name) extern __shared__ __align__(16) unsigned char name[]

struct alignas(16) u32x4 {
    u32 x, y, z, w;
};

__device__ __forceinline__ float f16_to_f32(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Rounds to nearest even; beyond the range it gives infinity.
__device__ __forceinline__ u16 f32_to_f16(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ __forceinline__ float bf16_to_f32(u16 bits) {
    return __uint_as_float((u32)bits << 16);
}

__device__ __forceinline__ u16 f32_to_bf16(float value) {
    u16 bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// The lower half holds `lo`.
__device__ __forceinline__ u32 pack_f16x2(float lo, float hi) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}

__device__ __forceinline__ u32 pack_bf16x2(float lo, float hi) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(hi), "f"(lo));
    return pair;
}

// d [16, 8] += a [16, 16] b [16, 8], fp32 sums. Lane 4 g + t holds of a: rows g, g + 8, g, g + 8 at columns 2 t and 2 t
// + 8; of b: column g at rows 2 t and 2 t + 8; of d: columns 2 t of rows g and g + 8.
__device__ __forceinline__ void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Four 8x8 matrices of 16-bit elements; lane i gives the address of row i % 8 of matrix i / 8, 16 bytes aligned to 16.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], const void* shared_row) {
    u32 address = (u32)__cvta_generic_to_shared(shared_row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], const void* shared_row) {
    u32 address = (u32)__cvta_generic_to_shared(shared_row);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address));
}

// Copies 16 bytes, both sides aligned to 16; where not `valid` it writes zeros and reads nothing. They are there after
// the wait and a barrier.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
    u32 address = (u32)__cvta_generic_to_shared(shared);
    u32 bytes = valid ? 16 : 0;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most N of this thread's latest groups are under way.
template <int N>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

__device__ __forceinline__ float shfl_xor_f32(float value, int lane_mask) {
    return __shfl_xor_sync(0xffffffffu, value, lane_mask);
}

__device__ __forceinline__ u32 shfl_idx_u32(u32 value, int lane) {
    return __shfl_sync(0xffffffffu, value, lane);
}

__device__ __forceinline__ u32 lane_id() {
    return threadIdx.x % 32;
}

__device__ __forceinline__ void syncwarp() {
    __syncwarp();
}

// Global memory, aligned to 16 and to 4 bytes.
__device__ __forceinline__ u32x4 load_16(const void* global) {
    return *(const u32x4*)global;
}

__device__ __forceinline__ void store_16(void* global, u32x4 value) {
    *(u32x4*)global = value;
}

__device__ __forceinline__ u32 load_4(const void* global) {
    return *(const u32*)global;
}

__device__ __forceinline__ void store_4(void* global, u32 value) {
    *(u32*)global = value;
}

__device__ __forceinline__ void atomic_or_u32(u32* address, u32 bits) {
    atomicOr(address, bits);
}

// 2^x, relative error below 2^-22; 2^-infinity is 0.
__device__ __forceinline__ float exp2_approx(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ float exp_accurate(float x) {
    return expf(x);
}

__device__ __forceinline__ float erf_accurate(float x) {
    return erff(x);
}

__device__ __forceinline__ float tanh_accurate(float x) {
    return tanhf(x);
}

__device__ __forceinline__ float rsqrt_accurate(float x) {
    return rsqrtf(x);
}

__device__ __forceinline__ double sqrt_f64(double x) {
    return sqrt(x);
}

#endif

// The element types. Their pairs are two elements in the order of memory.
struct f16 {
    u16 bits;
};

struct bf16 {
    u16 bits;
};

__device__ __forceinline__ float to_f32(f16 x) {
    return f16_to_f32(x.bits);
}

__device__ __forceinline__ float to_f32(bf16 x) {
    return bf16_to_f32(x.bits);
}

__device__ __forceinline__ float to_f32(float x) {
    return x;
}

template <class T>
struct Pair;

template <>
struct Pair<f16> {
    static __device__ __forceinline__ u32 pack(float lo, float hi) {
        return pack_f16x2(lo, hi);
    }
    static __device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
        mma_m16n8k16_f16(d, a, b);
    }
};

template <>
struct Pair<bf16> {
    static __device__ __forceinline__ u32 pack(float lo, float hi) {
        return pack_bf16x2(lo, hi);
    }
    static __device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
        mma_m16n8k16_bf16(d, a, b);
    }
};

__device__ __forceinline__ float word_to_f32(u32 word) {
    union {
        u32 word;
        float value;
    } same = {word};
    return same.value;
}

__device__ __forceinline__ u32 f32_to_word(float value) {
    union {
        float value;
        u32 word;
    } same = {value};
    return same.word;
}

__device__ __forceinline__ float negative_infinity() {
    return word_to_f32(0xff800000u);
}

// Eight neighbouring elements as they come from memory, aligned to 16 bytes.
template <class T>
struct Eight {
    u32x4 words[sizeof(T) / 2];

    // Zeros where not `wanted`; then nothing is read.
    static __device__ __forceinline__ Eight load(const T* global, bool wanted) {
        Eight raw;
#pragma unroll
        for (u32 i = 0; i < sizeof(T) / 2; i++) {
            raw.words[i] = u32x4{0, 0, 0, 0};
            if (wanted) raw.words[i] = load_16((const unsigned char*)global + 16 * i);
        }
        return raw;
    }
};

template <class T>
__device__ __forceinline__ void unpack(float (&x)[8], const Eight<T>& raw) {
    const u32 pairs[4] = {raw.words[0].x, raw.words[0].y, raw.words[0].z, raw.words[0].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        x[2 * i] = to_f32(T{(u16)pairs[i]});
        x[2 * i + 1] = to_f32(T{(u16)(pairs[i] >> 16)});
    }
}

__device__ __forceinline__ void unpack(float (&x)[8], const Eight<float>& raw) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        x[4 * i] = word_to_f32(raw.words[i].x);
        x[4 * i + 1] = word_to_f32(raw.words[i].y);
        x[4 * i + 2] = word_to_f32(raw.words[i].z);
        x[4 * i + 3] = word_to_f32(raw.words[i].w);
    }
}

template <class T>
__device__ __forceinline__ void load_8(float (&x)[8], const T* global) {
    unpack(x, Eight<T>::load(global, true));
}

template <class T>
__device__ __forceinline__ void store_8(T* global, const float (&x)[8]) {
    store_16(global, u32x4{Pair<T>::pack(x[0], x[1]), Pair<T>::pack(x[2], x[3]), Pair<T>::pack(x[4], x[5]),
                           Pair<T>::pack(x[6], x[7])});
}

__device__ __forceinline__ void store_8(float* global, const float (&x)[8]) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
        store_16(global + 4 * i, u32x4{f32_to_word(x[4 * i]), f32_to_word(x[4 * i + 1]), f32_to_word(x[4 * i + 2]),
                                       f32_to_word(x[4 * i + 3])});
    }
}

// The sum over a warp's lanes, the same in each, added in the same order whatever the launch.
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) x += shfl_xor_f32(x, mask);
    return x;
}

// False for NaN and the infinities.
__device__ __forceinline__ bool finite(float x) {
    return x - x == 0.0f;
}
