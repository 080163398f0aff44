//! Numbers that look random.

/// Numbers in -1 .. 1, the same at every call.
pub fn noise(count: usize) -> impl Iterator<Item = f32> {
    let mut state = 1_u64;
    (0..count).map(move |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    })
}
