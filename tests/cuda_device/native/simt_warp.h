// Host twins of warp primitives, tensor core instructions and vector accesses: included by simt.h.
#pragma once

inline u32 lane_id() { return simt::self()->lane; }

namespace simt {

struct Shuffle {
  u32 value, source, result;
};
SIMT_UNCHECKED inline void shuffle(void* const* operands) {
  for (u32 lane = 0; lane < 32; lane++) {
    Shuffle* own = (Shuffle*)operands[lane];
    own->result = ((Shuffle*)operands[own->source & 31])->value;
  }
}
inline void nothing(void* const*) {}

struct Mma {
  float* d;
  const u32 *a, *b;
};

struct WidenF16 {
  static Float8 widen(Half8 bits) { return __builtin_ia32_vcvtph2ps256(bits); }
};
struct WidenBf16 {
  static Float8 widen(Half8 bits) {
    typedef int Int8 __attribute__((vector_size(32)));
    typedef unsigned short Bits8 __attribute__((vector_size(16)));
    return (Float8)(__builtin_convertvector((Bits8)bits, Int8) << 16);
  }
};

// Fragments of mma.sync.m16n8k16: group g = lane / 4 and quad q = lane % 4 hold, as pairs of neighbours along k,
// a: rows g, g + 8 at k = 2q, then both at k = 2q + 8; b: column g at k = 2q, 2q + 8; d: columns 2q of rows g, g + 8.
template <class Type>
SIMT_UNCHECKED void mma_m16n8k16(void* const* operands) {
  // Pairs along k: those of row r from pairs_a[8 r] on, of column c from pairs_b[8 c] on.
  alignas(16) u32 pairs_a[16 * 8], pairs_b[8 * 8];
  for (u32 lane = 0; lane < 32; lane++) {
    const Mma* own = (const Mma*)operands[lane];
    u32 group = lane / 4, quad = lane % 4;
    for (u32 i = 0; i < 4; i++) pairs_a[(group + (i & 1) * 8) * 8 + quad + (i >> 1) * 4] = own->a[i];
    for (u32 i = 0; i < 2; i++) pairs_b[group * 8 + quad + i * 4] = own->b[i];
  }
  alignas(32) float a[16 * 16], columns[8 * 16];
  for (u32 i = 0; i < 32; i++) ((Float8*)a)[i] = Type::widen(((const Half8*)pairs_a)[i]);
  for (u32 i = 0; i < 16; i++) ((Float8*)columns)[i] = Type::widen(((const Half8*)pairs_b)[i]);
  Float8 b[16];
  for (u32 k = 0; k < 16; k++)
    for (u32 column = 0; column < 8; column++) b[k][column] = columns[column * 16 + k];
  for (u32 row = 0; row < 16; row++) {
    Float8 sum = {};
    for (u32 k = 0; k < 16; k++) sum += a[row * 16 + k] * b[k];
    for (u32 quad = 0; quad < 4; quad++) {
      float* d = ((const Mma*)operands[(row % 8) * 4 + quad])->d + (row / 8) * 2;
      d[0] += sum[quad * 2];
      d[1] += sum[quad * 2 + 1];
    }
  }
}

struct LoadMatrix {
  u32* result;
  const void* row;
  bool transposed;
};
// Lanes 8m to 8m + 7 name the rows (16 bytes each) of matrix m; register m of each lane gets two elements of it.
SIMT_UNCHECKED inline void load_matrix_x4(void* const* operands) {
  for (u32 matrix = 0; matrix < 4; matrix++) {
    const u16* rows[8];
    for (u32 row = 0; row < 8; row++) rows[row] = (const u16*)((const LoadMatrix*)operands[matrix * 8 + row])->row;
    for (u32 lane = 0; lane < 32; lane++) {
      const LoadMatrix* own = (const LoadMatrix*)operands[lane];
      u32 group = lane / 4, quad = lane % 4;
      own->result[matrix] = own->transposed ? rows[quad * 2][group] | (u32)rows[quad * 2 + 1][group] << 16
                                            : rows[group][quad * 2] | (u32)rows[group][quad * 2 + 1] << 16;
    }
  }
}

}  // namespace simt

inline void syncwarp(int line = __builtin_LINE()) { simt::collective("syncwarp", line, nullptr, simt::nothing); }
inline u32 shfl_idx_u32(u32 value, int lane, int line = __builtin_LINE()) {
  simt::Shuffle shuffle{value, (u32)lane, 0};
  simt::collective("shfl_idx", line, &shuffle, simt::shuffle);
  return shuffle.result;
}
inline float shfl_xor_f32(float value, int lane_mask, int line = __builtin_LINE()) {
  simt::Shuffle shuffle{__builtin_bit_cast(u32, value), lane_id() ^ (u32)lane_mask, 0};
  simt::collective("shfl_xor", line, &shuffle, simt::shuffle);
  return __builtin_bit_cast(float, shuffle.result);
}

inline void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], int line = __builtin_LINE()) {
  simt::Mma mma{d, a, b};
  simt::collective("mma_m16n8k16_f16", line, &mma, simt::mma_m16n8k16<simt::WidenF16>);
}
inline void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], int line = __builtin_LINE()) {
  simt::Mma mma{d, a, b};
  simt::collective("mma_m16n8k16_bf16", line, &mma, simt::mma_m16n8k16<simt::WidenBf16>);
}
inline void ldmatrix_x4(u32 (&r)[4], const void* shared_row, int line = __builtin_LINE()) {
  simt::check_access(shared_row, 16, "ldmatrix");
  simt::LoadMatrix load{r, shared_row, false};
  simt::collective("ldmatrix_x4", line, &load, simt::load_matrix_x4);
}
inline void ldmatrix_x4_trans(u32 (&r)[4], const void* shared_row, int line = __builtin_LINE()) {
  simt::check_access(shared_row, 16, "ldmatrix");
  simt::LoadMatrix load{r, shared_row, true};
  simt::collective("ldmatrix_x4_trans", line, &load, simt::load_matrix_x4);
}

// valid = false writes zeros, and reads nothing.
inline void cp_async_16(void* shared, const void* global, bool valid) { simt::copy_announced(shared, global, valid); }
inline void cp_async_commit() { simt::copies_committed(); }
template <int N>
inline void cp_async_wait() {
  simt::copies_awaited(N);
}

inline u32x4 load_16(const void* address) {
  simt::check_access(address, 16, "load_16");
  return *(const u32x4*)address;
}
inline void store_16(void* address, u32x4 value) {
  simt::check_access(address, 16, "store_16");
  *(u32x4*)address = value;
}
inline u32 load_4(const void* address) {
  simt::check_access(address, 4, "load_4");
  return *(const u32*)address;
}
inline void store_4(void* address, u32 value) {
  simt::check_access(address, 4, "store_4");
  *(u32*)address = value;
}
inline void atomic_or_u32(u32* address, u32 value) {
  simt::check_access(address, 4, "atomic_or");
  __atomic_fetch_or(address, value, __ATOMIC_RELAXED);
}
