//! Host twins of warp primitives: tensor core fragments, exchanges, asynchronous copies.

mod common;

use common::{blocks, kernel};
use cuda_device::Order;
use cudarc::driver::{CudaContext, PushKernelArg};
use half::{bf16, f16};

const ORDERS: [Order; 4] = [Order::Forward, Order::Reverse, Order::Random(3), Order::Random(4)];

#[test]
fn fragments_multiply_as_matrices() {
    let device = cuda_device::exclusive();
    let context = CudaContext::new(0).expect("a device");
    let stream = context.default_stream();
    let a: Vec<f32> = (0..256).map(|i| ((i * 37 % 64) as f32 - 31.0) / 8.0).collect();
    let b: Vec<f32> = (0..128).map(|i| ((i * 29 % 32) as f32 - 15.0) / 4.0).collect();
    let expected: Vec<f32> =
        (0..128).map(|at| (0..16).map(|k| a[at / 8 * 16 + k] * b[at % 8 * 16 + k]).sum()).collect();
    for order in ORDERS {
        device.set_order(order);
        for name in ["selftest_mma_f16", "selftest_mma_bf16"] {
            // All these numbers, and the sums, are exact in both types.
            let bits = |values: &[f32]| -> Vec<u16> {
                let bits_of = |&v: &f32| {
                    if name.ends_with("bf16") { bf16::from_f32(v).to_bits() } else { f16::from_f32(v).to_bits() }
                };
                values.iter().map(bits_of).collect()
            };
            let (a, b) = (stream.clone_htod(&bits(&a)).expect("copies"), stream.clone_htod(&bits(&b)).expect("copies"));
            let mut d = stream.alloc_zeros::<f32>(128).expect("allocates");
            let f = kernel(&context, name);
            // SAFETY: the kernel's arguments, of its shapes.
            unsafe { stream.launch_builder(&f).arg(&mut d).arg(&a).arg(&b).launch(blocks(1, 32)) }.expect("launches");
            assert_eq!(stream.clone_dtoh(&d).expect("copies back"), expected, "{name} {order:?}");
        }
    }
}

#[test]
fn fragments_are_transposed() {
    let _device = cuda_device::shared();
    let context = CudaContext::new(0).expect("a device");
    let stream = context.default_stream();
    let input = stream.clone_htod(&(0..64u16).collect::<Vec<_>>()).expect("copies");
    let mut out = stream.alloc_zeros::<u16>(64).expect("allocates");
    let f = kernel(&context, "selftest_transpose");
    // SAFETY: the kernel's arguments, 8 x 8 each.
    unsafe { stream.launch_builder(&f).arg(&mut out).arg(&input).launch(blocks(1, 32)) }.expect("launches");
    let expected: Vec<u16> = (0..64).map(|at| at % 8 * 8 + at / 8).collect();
    assert_eq!(stream.clone_dtoh(&out).expect("copies back"), expected);
}

#[test]
fn lanes_exchange() {
    let device = cuda_device::exclusive();
    let context = CudaContext::new(0).expect("a device");
    let stream = context.default_stream();
    let input = stream.clone_htod(&(0..64).map(|i| i as f32).collect::<Vec<_>>()).expect("copies");
    for order in ORDERS {
        device.set_order(order);
        let mut out = stream.alloc_zeros::<f32>(64).expect("allocates");
        let f = kernel(&context, "selftest_warp_sum");
        // SAFETY: the kernel's arguments, 64 each.
        unsafe { stream.launch_builder(&f).arg(&mut out).arg(&input).launch(blocks(1, 64)) }.expect("launches");
        let out = stream.clone_dtoh(&out).expect("copies back");
        assert!(out[..32].iter().all(|&v| v == 496.0) && out[32..].iter().all(|&v| v == 1520.0), "{order:?}: {out:?}");
    }
}

#[test]
fn asynchronous_copies_are_there_after_their_wait_and_a_barrier() {
    let device = cuda_device::exclusive();
    let context = CudaContext::new(0).expect("a device");
    let stream = context.default_stream();
    let input = stream.clone_htod(&(0..128u32).collect::<Vec<_>>()).expect("copies");
    let f = kernel(&context, "selftest_async_copy");
    let run = |wait: u32, barrier: u32| {
        let mut out = stream.alloc_zeros::<u32>(128).expect("allocates");
        let mut builder = stream.launch_builder(&f);
        builder.arg(&mut out).arg(&input).arg(&wait).arg(&barrier);
        // SAFETY: the kernel's arguments, 128 each.
        unsafe { builder.launch(blocks(1, 32)) }.expect("launches");
        stream.clone_dtoh(&out).expect("copies back")
    };
    let expected: Vec<u32> =
        (0..128).map(|at| at / 32 * 32 + ((at % 32) ^ 31)).map(|i| if i < 96 { i } else { 0 }).collect();
    for order in ORDERS {
        device.set_order(order);
        assert_eq!(run(1, 1), expected, "{order:?}");
        assert_ne!(run(0, 1), expected, "{order:?} does not show that the wait is missing");
        assert_ne!(run(1, 0), expected, "{order:?} does not show that the barrier is missing");
    }
}
