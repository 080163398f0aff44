#include "gemm.h"

#include <immintrin.h>
#include <math.h>
#include <string.h>

#include <algorithm>
#include <vector>

namespace gemm {

namespace {

// The microkernel's tile: 16 x 6 sums fill 12 of the 16 registers.
constexpr uint64_t kRows = 16, kColumns = 6;
// Of k, so that a panel of a stays in the first cache; of n, to bound what is packed.
constexpr uint64_t kDepth = 512, kWidth = 384;

float bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, sizeof value);
  return value;
}

uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float read(const void* data, Type type, uint64_t at) {
  if (type == Type::kF32) return ((const float*)data)[at];
  uint16_t bits = ((const uint16_t*)data)[at];
  return type == Type::kF16 ? _cvtsh_ss(bits) : bf16(bits);
}

void write(void* data, Type type, uint64_t at, float value) {
  if (type == Type::kF32) ((float*)data)[at] = value;
  else ((uint16_t*)data)[at] = type == Type::kF16 ? (uint16_t)_cvtss_sh(value, 0) : to_bf16(value);
}

// `count` neighbours from element `at` on.
void widen(const void* data, Type type, uint64_t at, uint64_t count, float* out) {
  uint64_t i = 0;
  if (type == Type::kF32) {
    memcpy(out, (const float*)data + at, count * 4);
    return;
  }
  const uint16_t* from = (const uint16_t*)data + at;
  for (; i + 8 <= count; i += 8) {
    __m128i half = _mm_loadu_si128((const __m128i*)(from + i));
    __m256 wide = type == Type::kF16 ? _mm256_cvtph_ps(half)
                                     : _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    _mm256_storeu_ps(out + i, wide);
  }
  for (; i < count; i++) out[i] = read(data, type, at + i);
}

// A panel: `width` rows of a (columns of b) from `first` on, of which `present` exist, as [depth][width], zeros beyond.
// `along_k`: whether neighbours in memory are neighbours along k.
void pack(const Matrix& matrix, bool along_k, uint64_t first, uint64_t present, uint64_t width, uint64_t k, uint64_t depth,
          float* out) {
  float line[kDepth];
  if (along_k) {
    for (uint64_t i = 0; i < width; i++) {
      if (i < present) widen(matrix.data, matrix.type, (first + i) * matrix.ld + k, depth, line);
      for (uint64_t d = 0; d < depth; d++) out[d * width + i] = i < present ? line[d] : 0;
    }
    return;
  }
  for (uint64_t d = 0; d < depth; d++) {
    widen(matrix.data, matrix.type, (k + d) * matrix.ld + first, present, line);
    for (uint64_t i = 0; i < width; i++) out[d * width + i] = i < present ? line[i] : 0;
  }
}

// sums [6 columns][rows from 16] += panels; `stride` floats from one column of sums to the next.
void multiply(const float* a, const float* b, uint64_t depth, float* sums, uint64_t stride) {
  __m256 total[kColumns][2];
  for (uint64_t j = 0; j < kColumns; j++)
    for (uint64_t half = 0; half < 2; half++) total[j][half] = _mm256_loadu_ps(sums + j * stride + half * 8);
  for (uint64_t d = 0; d < depth; d++, a += kRows, b += kColumns) {
    __m256 upper = _mm256_loadu_ps(a), lower = _mm256_loadu_ps(a + 8);
#pragma GCC unroll 6
    for (uint64_t j = 0; j < kColumns; j++) {
      __m256 factor = _mm256_broadcast_ss(b + j);
      total[j][0] = _mm256_fmadd_ps(upper, factor, total[j][0]);
      total[j][1] = _mm256_fmadd_ps(lower, factor, total[j][1]);
    }
  }
  for (uint64_t j = 0; j < kColumns; j++)
    for (uint64_t half = 0; half < 2; half++) _mm256_storeu_ps(sums + j * stride + half * 8, total[j][half]);
}

// The tanh approximation, as cublasLt's.
float gelu(float x) { return 0.5f * x * (1 + tanhf(0.7978845608f * (x + 0.044715f * x * x * x))); }

void finish(const Product& product, uint64_t column, const float* sums) {
  for (uint64_t i = 0; i < product.m; i++) {
    float value = product.alpha * sums[i];
    if (product.beta != 0) value += product.beta * read(product.c.data, product.c.type, column * product.c.ld + i);
    if (product.bias) value += read(product.bias, product.bias_type, i);
    if (product.activation == Activation::kRelu) value = value > 0 ? value : 0;
    if (product.activation == Activation::kGelu) value = gelu(value);
    write(product.d.data, product.d.type, column * product.d.ld + i, value);
  }
}

uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

}  // namespace

void run(const Product& product) {
  uint64_t stride = round_up(product.m, kRows);
  std::vector<float> panel_a(kRows * kDepth), panels_b(kWidth * kDepth), sums;
  for (uint64_t n = 0; n < product.n; n += kWidth) {
    uint64_t columns = std::min(kWidth, product.n - n);
    uint64_t padded = round_up(columns, kColumns);
    sums.assign(padded * stride, 0);
    for (uint64_t k = 0; k < product.k; k += kDepth) {
      uint64_t depth = std::min(kDepth, product.k - k);
      for (uint64_t j = 0; j < columns; j += kColumns)
        pack(product.b, !product.transpose_b, n + j, std::min(kColumns, columns - j), kColumns, k, depth,
             &panels_b[j * depth]);
      for (uint64_t i = 0; i < product.m; i += kRows) {
        pack(product.a, product.transpose_a, i, std::min(kRows, product.m - i), kRows, k, depth, panel_a.data());
        for (uint64_t j = 0; j < columns; j += kColumns)
          multiply(panel_a.data(), &panels_b[j * depth], depth, &sums[j * stride + i], stride);
      }
    }
    for (uint64_t j = 0; j < columns; j++) finish(product, n + j, &sums[j * stride]);
  }
}

}  // namespace gemm
