//! Elementary functions of fp32, written so that a loop over them vectorizes: no branches, no table, no call.
//!
//! They are inlined into functions that are compiled once per instruction set (`kernels.rs`). `FMA` says whether that
//! set has fused multiply-add; without it `mul_add` would be a slow library call.

/// `a * b + c`.
#[inline(always)]
pub(super) fn fma<const FMA: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FMA { a.mul_add(b, c) } else { a * b + c }
}

/// `x` in `low ..= high`; unlike `clamp`, `min` and `max` of vector instructions, NaN stays NaN.
#[inline(always)]
fn bounded(x: f32, low: f32, high: f32) -> f32 {
    let x = if x < low { low } else { x };
    if x > high { high } else { x }
}

/// `e^x`, relative error below 2e-7; below -87 it is `e^-87`, above 88 `e^88`. NaN gives NaN.
#[inline(always)]
pub(super) fn exp<const FMA: bool>(x: f32) -> f32 {
    /// Adding it rounds to an integer, which then stands in the low bits.
    const ROUND: f32 = 12_582_912.0;
    let x = bounded(x, -87.0, 88.0);
    let shifted = fma::<FMA>(x, std::f32::consts::LOG2_E, ROUND);
    let n = shifted - ROUND;
    // ln 2 in two parts, so that the remainder is exact.
    let r = fma::<FMA>(n, -0.693_359_4, x);
    let r = fma::<FMA>(n, 2.121_944_4e-4, r);
    // Cephes' polynomial for |r| <= ln(2) / 2.
    let mut p = 1.987_569_1e-4;
    p = fma::<FMA>(p, r, 1.398_199_9e-3);
    p = fma::<FMA>(p, r, 8.333_452e-3);
    p = fma::<FMA>(p, r, 4.166_579_6e-2);
    p = fma::<FMA>(p, r, 1.666_666_5e-1);
    p = fma::<FMA>(p, r, 0.5);
    let p = fma::<FMA>(p * r, r, r) + 1.0;
    // 2^n through the exponent's bits.
    let scale = f32::from_bits((shifted.to_bits().wrapping_add(127)) << 23);
    p * scale
}

/// The error function, absolute error below 6e-7. NaN gives NaN.
#[inline(always)]
pub(super) fn erf<const FMA: bool>(x: f32) -> f32 {
    /// Beyond it erf is 1 or -1 but for 1.2e-7.
    const END: f32 = 3.743_92;
    // A rational minimax approximation of erf(x) / x in x^2.
    let x = bounded(x, -END, END);
    let x2 = x * x;
    let mut p = 2.290_506_6e-4;
    p = fma::<FMA>(p, x2, 3.408_291e-3);
    p = fma::<FMA>(p, x2, 5.095_569_5e-2);
    p = fma::<FMA>(p, x2, 1.852_083_2e-1);
    p = fma::<FMA>(p, x2, std::f32::consts::FRAC_2_SQRT_PI);
    let mut q = -1.179_160_3e-7;
    q = fma::<FMA>(q, x2, 2.354_796_6e-5);
    q = fma::<FMA>(q, x2, 1.017_962_5e-3);
    q = fma::<FMA>(q, x2, 1.407_047e-2);
    q = fma::<FMA>(q, x2, 1.109_850_5e-1);
    q = fma::<FMA>(q, x2, 4.974_692_5e-1);
    q = fma::<FMA>(q, x2, 1.0);
    let y = x * p / q;
    let y = if x <= -END { -1.0 } else { y };
    if x >= END { 1.0 } else { y }
}

/// GELU by erf, as PyTorch's default, absolute error below 1.5e-6.
#[inline(always)]
pub(super) fn gelu<const FMA: bool>(x: f32) -> f32 {
    let half = 0.5 * x;
    fma::<FMA>(half, erf::<FMA>(x * std::f32::consts::FRAC_1_SQRT_2), half)
}

/// GELU by its tanh approximation: `x * sigmoid(2 u)`, `u = sqrt(2 / pi) (x + 0.044715 x^3)`.
#[inline(always)]
pub(super) fn gelu_tanh<const FMA: bool>(x: f32) -> f32 {
    let u2 = 1.595_769 * x * fma::<FMA>(0.044_715 * x, x, 1.0);
    x / (1.0 + exp::<FMA>(-u2))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// erf in f64: the Taylor series, or the continued fraction of erfc further out.
    fn erf_f64(x: f64) -> f64 {
        if x.abs() < 3.0 {
            let (mut term, mut sum) = (x, x);
            for n in 1..200 {
                term *= -x * x / f64::from(n);
                sum += term / f64::from(2 * n + 1);
            }
            sum * std::f64::consts::FRAC_2_SQRT_PI
        } else {
            let mut fraction = 0.0;
            for n in (1..200).rev() {
                fraction = f64::from(n) / 2.0 / (x.abs() + fraction);
            }
            let erfc = (-x * x).exp() / std::f64::consts::PI.sqrt() / (x.abs() + fraction);
            x.signum() * (1.0 - erfc)
        }
    }

    fn sweep(low: f32, high: f32, mut check: impl FnMut(f32)) {
        let steps = 200_000;
        for i in 0..=steps {
            check(low + (high - low) * i as f32 / steps as f32);
        }
    }

    #[test]
    fn exp_is_accurate() {
        sweep(-86.9, 87.9, |x| {
            let right = f64::from(x).exp();
            for e in [exp::<true>(x), exp::<false>(x)] {
                assert!((f64::from(e) / right - 1.0).abs() < 2e-7, "exp({x}) = {e}, not {right}");
            }
        });
        assert_eq!(exp::<true>(0.0), 1.0);
        assert!(exp::<true>(-1e9) < 2e-38 && exp::<true>(f32::NEG_INFINITY) < 2e-38);
        assert!(exp::<true>(f32::NAN).is_nan() && exp::<false>(f32::NAN).is_nan());
    }

    #[test]
    fn gelu_is_accurate() {
        sweep(-8.0, 8.0, |x| {
            let wide = f64::from(x);
            assert!((f64::from(erf::<true>(x)) - erf_f64(wide)).abs() < 6e-7, "erf({x})");
            let right = 0.5 * wide * (1.0 + erf_f64(wide / 2f64.sqrt()));
            for y in [gelu::<true>(x), gelu::<false>(x)] {
                assert!((f64::from(y) - right).abs() < 1.5e-6, "gelu({x}) = {y}, not {right}");
            }
            let u = (2.0 / std::f64::consts::PI).sqrt() * (wide + 0.044715 * wide.powi(3));
            let right = 0.5 * wide * (1.0 + u.tanh());
            assert!((f64::from(gelu_tanh::<true>(x)) - right).abs() < 1e-6, "gelu_tanh({x})");
        });
        for f in [gelu::<true>, gelu_tanh::<true>] {
            assert!(f(f32::NAN).is_nan());
            assert_eq!((f(1e30), f(0.0)), (1e30, 0.0));
            assert!(f(-1e4).abs() < 1e-3);
        }
    }
}
