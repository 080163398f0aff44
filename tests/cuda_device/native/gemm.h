// Matrix products of cublasLt's stand-in: fp16, bf16 or fp32 in and out, fp32 sums.
#pragma once
#include <stdint.h>

namespace gemm {

enum class Type { kF32, kF16, kBf16 };
inline uint64_t size_of(Type type) { return type == Type::kF32 ? 4 : 2; }

enum class Activation { kNone, kRelu, kGelu };

// Column-major; `ld` elements from one column to the next.
struct Matrix {
  void* data;
  Type type;
  int64_t ld;
};

// d [m, n] = activation(alpha op(a) [m, k] op(b) [k, n] + beta c + bias [m]).
struct Product {
  uint64_t m, n, k;
  Matrix a, b, c, d;
  bool transpose_a, transpose_b;
  float alpha, beta;
  const void* bias;  // or null
  Type bias_type;
  Activation activation;
};

void run(const Product& product);

}  // namespace gemm
