//! The AMX tiles, of bf16 and int8: up to 32 rows by 32 columns, each quarter a register of 16 by 16 sums that the CPU
//! multiplies 16 rows by 16 steps into at once.
//!
//! Registers 0 to 3 hold the sums, 4 and 5 rows of `a`, 6 and 7 columns of `b`. Their shape is a state of the thread;
//! [`release`] ends it, since a thread that has it costs more to switch away from. Intrinsics for AMX are not stable
//! yet in Rust, so this is assembly; the compiler itself never uses these registers.
#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::Cell;

use super::int8::Scales;
use super::kernels::{Blocking, MOST_PANELS, MOST_ROWS, PANEL, Tile};
use super::low::UNIT;

/// A piece of a tile's rows, 24 KiB, stays in the first-level cache while those of the panels pass by, and the panels
/// in the second-level one: rows do not follow each other in memory, and the CPU sees less well which it needs next.
pub(super) const BLOCKING: Blocking = Blocking { rows: MOST_ROWS, panels: MOST_PANELS, steps: 12 * UNIT };
/// Rows of a register.
const HALF: usize = 16;

/// Whether this CPU has AMX and the system lets this process use it, which is asked for here. Linux has to make room
/// for the registers of its threads.
pub(super) fn available() -> bool {
    /// From the kernel's `asm/prctl.h`, and the number of the registers' state component.
    const ARCH_REQ_XCOMP_PERM: libc::c_long = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_long = 18;
    const AMX_BF16: u32 = 1 << 22;
    const AMX_TILE: u32 = 1 << 24;
    const AMX_INT8: u32 = 1 << 25;
    if __cpuid(0).eax < 7 || !cfg!(target_os = "linux") {
        return false;
    }
    let wanted = AMX_BF16 | AMX_TILE | AMX_INT8;
    // SAFETY: this call changes nothing but what the process may use.
    __cpuid_count(7, 0).edx & wanted == wanted
        && unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) } == 0
}

thread_local! {
    /// How many rows the registers of sums and of `a` have in this thread; 0 while they have no shape.
    static SHAPE: Cell<u8> = const { Cell::new(0) };
}

/// What LDTILECFG reads.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    bytes_a_row: [u16; 16],
    rows: [u8; 16],
}

/// Gives the registers their shape unless they have it.
///
/// # Safety
/// [`available`] has been true.
#[inline(always)]
unsafe fn configure(rows: usize) {
    if usize::from(SHAPE.get()) != rows {
        let rows = rows as u8;
        let mut config = Config { palette: 1, start_row: 0, reserved: [0; 14], bytes_a_row: [0; 16], rows: [0; 16] };
        config.bytes_a_row[..8].fill(64);
        config.rows[..6].fill(rows);
        config.rows[6..8].fill(UNIT as u8);
        // SAFETY: the CPU has the instruction, and the 64 bytes are such a shape.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, readonly, preserves_flags)) };
        SHAPE.set(rows);
    }
}

/// Ends this thread's use of the registers. To be called before anybody else's code runs in it.
pub(super) fn release() {
    if SHAPE.replace(0) != 0 {
        // SAFETY: they have a shape, so the CPU has the instruction.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

/// The product of a tile with the instruction `$multiply`: raw sums into `out`, on top of those of earlier pieces.
///
/// [`Tile::next`] is not asked for: the CPUs that have AMX see by themselves that the panels follow each other, and a
/// prefetch takes a place of the few loads that can be under way. One short text was a fifth slower with it.
macro_rules! product {
    ($t:expr, $multiply:literal) => {{
        let t: &mut Tile<'_, _, _> = $t;
        let half = t.rows.min(HALF);
        configure(half);
        let (lda, ldo) = (t.lda * size_of_val(&t.a[0]), t.ldo * size_of::<f32>());
        let rounds = t.k / UNIT;
        let (a, out) = (t.a.as_ptr().cast::<u8>(), t.out.as_mut_ptr().cast::<u8>());
        // The last rows, if more than 16: some of them may be in both halves.
        let second = t.rows - half;
        if second == 0 {
            asm!(
                "test {first}, {first}",
                "jnz 3f",
                "tileloadd tmm0, [{out} + {ldo}]",
                "tileloadd tmm1, [{out} + {ldo} + 64]",
                "jmp 2f",
                "3:",
                "tilezero tmm0",
                "tilezero tmm1",
                "2:",
                "tileloadd tmm4, [{a} + {lda}]",
                "tileloadd tmm6, [{b} + {ldb}]",
                concat!($multiply, " tmm0, tmm4, tmm6"),
                "tileloadd tmm7, [{b} + {ldb} + 64]",
                concat!($multiply, " tmm1, tmm4, tmm7"),
                "add {a}, 64",
                "add {b}, 2048",
                "dec {rounds}",
                "jnz 2b",
                "tilestored [{out} + {ldo}], tmm0",
                "tilestored [{out} + {ldo} + 64], tmm1",
                a = inout(reg) a => _,
                b = inout(reg) t.b.as_ptr() => _,
                rounds = inout(reg) rounds => _,
                first = in(reg) usize::from(t.piece.first),
                lda = in(reg) lda,
                ldb = in(reg) 128_usize,
                ldo = in(reg) ldo,
                out = in(reg) out,
                options(nostack),
            );
        } else {
            asm!(
                "test {first}, {first}",
                "jnz 3f",
                "tileloadd tmm0, [{out} + {ldo}]",
                "tileloadd tmm1, [{out} + {ldo} + 64]",
                "tileloadd tmm2, [{out2} + {ldo}]",
                "tileloadd tmm3, [{out2} + {ldo} + 64]",
                "jmp 2f",
                "3:",
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "2:",
                "tileloadd tmm4, [{a} + {lda}]",
                "tileloadd tmm6, [{b} + {ld}]",
                concat!($multiply, " tmm0, tmm4, tmm6"),
                "tileloadd tmm7, [{b} + {ld} + 64]",
                concat!($multiply, " tmm1, tmm4, tmm7"),
                "tileloadd tmm5, [{second} + {lda}]",
                concat!($multiply, " tmm2, tmm5, tmm6"),
                concat!($multiply, " tmm3, tmm5, tmm7"),
                "add {a}, 64",
                "add {second}, 64",
                "add {b}, 2048",
                "dec {rounds}",
                "jnz 2b",
                "mov {ld}, {ldo}",
                "tilestored [{out} + {ld}], tmm0",
                "tilestored [{out} + {ld} + 64], tmm1",
                "tilestored [{out2} + {ld}], tmm2",
                "tilestored [{out2} + {ld} + 64], tmm3",
                a = inout(reg) a => _,
                second = inout(reg) a.add(second * lda) => _,
                b = inout(reg) t.b.as_ptr() => _,
                rounds = inout(reg) rounds => _,
                first = in(reg) usize::from(t.piece.first),
                lda = in(reg) lda,
                ld = inout(reg) 128_usize => _,
                ldo = in(reg) ldo,
                out = in(reg) out,
                out2 = in(reg) out.add(second * ldo),
                options(nostack),
            );
        }
    }};
}

/// Only in the table of kernels that is given out where [`available`] is true.
pub(super) fn tile_bf16(mut t: Tile<'_, u16>) {
    t.check_rows::<PANEL, MOST_ROWS>();
    assert!(t.k.is_multiple_of(UNIT) && t.k > 0);
    // SAFETY: the CPU has AMX, and `check` has compared the lengths with what is read and written.
    unsafe { product!(&mut t, "tdpbf16ps") }
}

/// The same.
pub(super) fn tile_int8(mut t: Tile<'_, u8, i8>, scales: &Scales<'_>) {
    t.check_rows::<PANEL, MOST_ROWS>();
    assert!(t.k.is_multiple_of(UNIT) && t.k > 0);
    assert!(scales.rows.len() >= t.rows && scales.columns.len() >= PANEL && scales.sums.len() >= PANEL);
    // SAFETY: the CPU has AMX and AVX-512, and the lengths were compared with what is read and written.
    unsafe {
        product!(&mut t, "tdpbusd");
        if t.piece.last {
            dequantize(&mut t, scales);
        }
    }
}

/// Turns the int32 sums in `t.out` into the product.
///
/// # Safety
/// `t.check()` has passed and `scales` has as many rows and 32 columns.
#[target_feature(enable = "avx512f")]
unsafe fn dequantize(t: &mut Tile<'_, u8, i8>, scales: &Scales<'_>) {
    let out = t.out.as_mut_ptr();
    for half in [0, HALF] {
        // SAFETY: `sums` and `columns` have 32 numbers.
        let (sums, columns) = unsafe {
            (
                _mm512_loadu_si512(scales.sums.as_ptr().add(half).cast()),
                _mm512_loadu_ps(scales.columns.as_ptr().add(half)),
            )
        };
        for (r, row) in scales.rows[..t.rows].iter().enumerate() {
            // SAFETY: `out` has as many rows of 32 numbers that are `ldo` apart.
            unsafe {
                let out = out.add(r * t.ldo + half);
                // The sum of `(q - zero) * w` is the sum of `q * w` less `zero` times the sum of `w`.
                let zeros = _mm512_mullo_epi32(_mm512_set1_epi32(row.zero), sums);
                let sum = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_loadu_si512(out.cast()), zeros));
                _mm512_storeu_ps(out, _mm512_mul_ps(sum, _mm512_mul_ps(_mm512_set1_ps(row.scale), columns)));
            }
        }
    }
}
