// gather_rows: out [n, pieces] = in [*, pieces] at the rows index [n], pieces of 16 bytes of whatever type. One warp a
//   row.

#include "common.cuh"

extern "C" __global__ void __launch_bounds__(128)
    gather_rows(u32x4* out, const u32x4* in, const u32* index, u32 n, u32 pieces) {
    u32 row = blockIdx.x * 4 + threadIdx.x / 32;
    if (row >= n) return;
    const u32x4* from = in + (u64)index[row] * pieces;
    for (u32 i = lane_id(); i < pieces; i += 32) store_16(out + (u64)row * pieces + i, load_16(from + i));
}
