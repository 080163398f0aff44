// Host twins of conversions and of arithmetic: included by simt.h.
#pragma once

namespace simt {
typedef short Half8 __attribute__((vector_size(16)));
typedef float Float4 __attribute__((vector_size(16)));
typedef float Float8 __attribute__((vector_size(32)));
}  // namespace simt

inline float f16_to_f32(u16 bits) {
  simt::Half8 half = {(short)bits};
  return __builtin_ia32_vcvtph2ps(half)[0];
}
// Round to nearest, ties to even.
inline u16 f32_to_f16(float value) {
  simt::Float4 wide = {value};
  return (u16)__builtin_ia32_vcvtps2ph(wide, 0)[0];
}
inline float bf16_to_f32(u16 bits) {
  u32 wide = (u32)bits << 16;
  return __builtin_bit_cast(float, wide);
}
// Round to nearest, ties to even; NaN gives the NaN that the hardware gives.
inline u16 f32_to_bf16(float value) {
  u32 bits = __builtin_bit_cast(u32, value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (u16)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
// The first argument goes into the lower half.
inline u32 pack_f16x2(float lo, float hi) { return f32_to_f16(lo) | (u32)f32_to_f16(hi) << 16; }
inline u32 pack_bf16x2(float lo, float hi) { return f32_to_bf16(lo) | (u32)f32_to_bf16(hi) << 16; }

inline float exp2_approx(float x) { return __builtin_exp2f(x); }
inline float exp_accurate(float x) { return __builtin_expf(x); }
inline float erf_accurate(float x) { return __builtin_erff(x); }
inline float tanh_accurate(float x) { return __builtin_tanhf(x); }
inline float rsqrt_accurate(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float sqrt_accurate(float x) { return __builtin_sqrtf(x); }
inline double sqrt_f64(double x) { return __builtin_sqrt(x); }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline float fmaxf(float a, float b) { return __builtin_fmaxf(a, b); }
inline float fminf(float a, float b) { return __builtin_fminf(a, b); }
inline float fabsf(float a) { return __builtin_fabsf(a); }
