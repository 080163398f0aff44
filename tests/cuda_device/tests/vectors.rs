//! Launches through an unmodified cudarc: copies, kernels, barriers, orders of threads.

mod common;

use common::{blocks, kernel};
use cuda_device::Order;
use cudarc::driver::{CudaContext, PushKernelArg};

#[test]
fn a_kernel_computes() {
    let _device = cuda_device::shared();
    for number in 0..2 {
        let context = CudaContext::new(number).expect("two devices");
        let stream = context.default_stream();
        let n = 1000u32;
        let a = stream.clone_htod(&(0..n).map(|i| i as f32).collect::<Vec<_>>()).expect("copies");
        let b = stream.clone_htod(&vec![0.5f32; n as usize]).expect("copies");
        let mut out = stream.alloc_zeros::<f32>(n as usize).expect("allocates");
        let f = kernel(&context, "selftest_axpy");
        let config = blocks(4, 256);
        // SAFETY: the kernel's arguments, with buffers of `n` elements.
        unsafe { stream.launch_builder(&f).arg(&mut out).arg(&a).arg(&b).arg(&2.0f32).arg(&n).launch(config) }
            .expect("launches");
        let out = stream.clone_dtoh(&out).expect("copies back");
        assert!(out.iter().enumerate().all(|(i, &value)| value == 2.0 * i as f32 + 0.5));
    }
}

/// Sums of blocks of 256 ones and twos.
fn block_sums(name: &str) -> Vec<f32> {
    let context = CudaContext::new(0).expect("a device");
    let stream = context.default_stream();
    let x: Vec<f32> = (0..1024).map(|i| (1 + i / 512) as f32).collect();
    let x = stream.clone_htod(&x).expect("copies");
    let mut sums = stream.alloc_zeros::<f32>(4).expect("allocates");
    let f = kernel(&context, name);
    let config = blocks(4, 256);
    // SAFETY: the kernel's arguments; 4 blocks have 4 sums and 1024 elements.
    unsafe { stream.launch_builder(&f).arg(&mut sums).arg(&x).launch(config) }.expect("launches");
    stream.clone_dtoh(&sums).expect("copies back")
}

#[test]
fn barriers_hold_and_a_missing_one_is_found() {
    let device = cuda_device::exclusive();
    let mut found = 0;
    for order in [Order::Forward, Order::Reverse, Order::Random(1), Order::Random(2)] {
        device.set_order(order);
        assert_eq!(block_sums("selftest_block_sum"), [256.0, 256.0, 512.0, 512.0], "{order:?}");
        found += (block_sums("selftest_block_sum_racy") != [256.0, 256.0, 512.0, 512.0]) as u32;
    }
    assert!(found >= 1, "no order shows that a barrier is missing");
}
