//! What the hardware rejects is rejected, with its error code, and the reason names the thread.

mod common;

use std::sync::Arc;

use common::{blocks, kernel};
use cuda_device::Exclusive;
use cudarc::driver::sys::CUresult;
use cudarc::driver::sys::cudaError_enum::{
    CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_LAUNCH_FAILED, CUDA_ERROR_MISALIGNED_ADDRESS,
};
use cudarc::driver::{CudaContext, CudaStream, DriverError, LaunchConfig, PushKernelArg};

fn quiet_device() -> (Exclusive, Arc<CudaContext>, Arc<CudaStream>) {
    let device = cuda_device::exclusive();
    device.set_verbose(false);
    let context = CudaContext::new(0).expect("a device");
    let stream = context.default_stream();
    (device, context, stream)
}

/// Launches a self-test kernel with these arguments, and waits.
macro_rules! outcome {
    ($context:expr, $name:expr, $config:expr $(, $argument:expr)*) => {{
        let stream = $context.default_stream();
        let function = kernel(&$context, $name);
        let mut builder = stream.launch_builder(&function);
        $(builder.arg($argument);)*
        // SAFETY: arguments of the kernel's types; what it does wrong is what is tested.
        unsafe { builder.launch($config) }.and_then(|_| stream.synchronize())
    }};
}

/// The launch has lost the device with `code`; then it is made to work again.
#[track_caller]
fn lost(device: &Exclusive, context: &CudaContext, result: Result<(), DriverError>, code: CUresult, why: &str) {
    assert_eq!(result, Err(DriverError(code)), "{}", device.message());
    let message = device.message();
    assert!(message.contains(why), "'{message}' does not say '{why}'");
    assert_eq!(context.synchronize(), Err(DriverError(code)), "the error stays");
    device.recover();
    // cudarc keeps the errors of what was dropped meanwhile.
    let _ = context.check_err();
    assert_eq!(context.synchronize(), Ok(()));
}

#[test]
fn accesses_beyond_an_allocation() {
    let (device, context, stream) = quiet_device();
    // 10 floats end before the 256 bytes that memory is aligned to; a megabyte ends where nothing is mapped.
    for (n, index) in [(10usize, 10u64), (10, 1 << 20), (1 << 18, 1 << 18), (1 << 18, u64::MAX), (10, 1 << 50)] {
        let mut out = stream.alloc_zeros::<f32>(n).expect("allocates");
        let last = n as u64 - 1;
        assert_eq!(outcome!(context, "selftest_write", blocks(1, 32), &mut out, &last, &1f32), Ok(()));
        let result = outcome!(context, "selftest_write", blocks(1, 32), &mut out, &index, &1f32);
        lost(&device, &context, result, CUDA_ERROR_ILLEGAL_ADDRESS, "selftest_write: ");
        if index == 1 << 20 {
            assert!(device.message().contains("block (0, 0, 0), thread (5, 0, 0)"), "{}", device.message());
        }
    }
}

#[test]
fn addresses_that_are_no_memory_of_the_device() {
    let (device, context, stream) = quiet_device();
    let on_host = [0u32; 64];
    let host_address = on_host.as_ptr().addr() as u64;
    let mut out = stream.alloc_zeros::<u32>(32).expect("allocates");
    let result = outcome!(context, "selftest_warp_sum", blocks(1, 64), &host_address, &host_address);
    lost(&device, &context, result, CUDA_ERROR_ILLEGAL_ADDRESS, "argument 0");
    // One that is in a buffer.
    let table = stream.clone_htod(&[host_address]).expect("copies");
    let result = outcome!(context, "selftest_follow", blocks(1, 32), &mut out, &table);
    lost(&device, &context, result, CUDA_ERROR_ILLEGAL_ADDRESS, "no memory of the device");
    // One that was freed.
    let freed = stream.alloc_zeros::<u32>(32).expect("allocates");
    let address = cudarc::driver::DevicePtr::device_ptr(&freed, &stream).0;
    drop(freed);
    let result = outcome!(context, "selftest_write", blocks(1, 32), &address, &0u64, &1f32);
    lost(&device, &context, result, CUDA_ERROR_ILLEGAL_ADDRESS, "no live memory");
    // One of the other device.
    let other = CudaContext::new(1).expect("two devices").default_stream().alloc_zeros::<f32>(8).expect("allocates");
    let address = cudarc::driver::DevicePtr::device_ptr(&other, other.stream()).0;
    let result = outcome!(context, "selftest_write", blocks(1, 32), &address, &0u64, &1f32);
    lost(&device, &context, result, CUDA_ERROR_ILLEGAL_ADDRESS, "memory of device 1");
}

#[test]
fn misaligned_vector_accesses() {
    let (device, context, stream) = quiet_device();
    let input = stream.alloc_zeros::<u8>(64).expect("allocates");
    let mut out = stream.alloc_zeros::<u32>(32).expect("allocates");
    for kind in 0..2u32 {
        for offset in [0u32, 48] {
            let result = outcome!(context, "selftest_load_16", blocks(1, 32), &mut out, &input, &offset, &kind);
            assert_eq!(result, Ok(()));
        }
        let result = outcome!(context, "selftest_load_16", blocks(1, 32), &mut out, &input, &4u32, &kind);
        lost(&device, &context, result, CUDA_ERROR_MISALIGNED_ADDRESS, "thread (0, 0, 0)");
    }
}

#[test]
fn threads_that_cannot_meet() {
    let (device, context, stream) = quiet_device();
    let mut out = stream.alloc_zeros::<u32>(64).expect("allocates");
    let reasons =
        ["ends while other lanes", "other threads wait at the one of line", "deadlock", "", "ends while other lanes"];
    for (kind, why) in (0u32..).zip(reasons) {
        let result = outcome!(context, "selftest_diverge", blocks(1, 64), &mut out, &kind);
        match why {
            "" => assert_eq!(result, Ok(()), "threads that have ended count as arrived"),
            why => lost(&device, &context, result, CUDA_ERROR_LAUNCH_FAILED, why),
        }
    }
    // A warp of which not all lanes exist.
    let result = outcome!(context, "selftest_warp_sum", blocks(1, 48), &out, &out);
    lost(&device, &context, result, CUDA_ERROR_LAUNCH_FAILED, "not all 32 lanes");
    let result = outcome!(context, "selftest_stack_overflow", blocks(1, 32), &out, &100_000u32);
    lost(&device, &context, result, CUDA_ERROR_LAUNCH_FAILED, "stack overflow");
}

#[test]
fn shared_memory() {
    let (device, context, stream) = quiet_device();
    let mut out = stream.alloc_zeros::<u32>(64).expect("allocates");
    for (kind, index) in [(0u32, 32u32), (1, 32), (1, 33)] {
        let result = outcome!(context, "selftest_shared_overrun", blocks(1, 32), &mut out, &index, &kind);
        lost(&device, &context, result, CUDA_ERROR_ILLEGAL_ADDRESS, "selftest_shared_overrun");
    }
    // What one block leaves there is gone when the next one starts.
    assert_eq!(outcome!(context, "selftest_fresh_shared", blocks(2, 32), &mut out), Ok(()));
    assert_eq!(stream.clone_dtoh(&out).expect("copies"), [u32::MAX; 64]);

    let dynamic = |bytes: u32| LaunchConfig { shared_mem_bytes: bytes, ..blocks(1, 32) };
    for bytes in [16, 1000, 48 << 10] {
        assert_eq!(outcome!(context, "selftest_dynamic_shared", dynamic(bytes), &mut out, &bytes), Ok(()));
        assert_eq!(stream.clone_dtoh(&out).expect("copies")[0], bytes);
    }
    // A byte more than there is, to the 16 that it is aligned to.
    let result = outcome!(context, "selftest_dynamic_shared", dynamic(1008), &mut out, &1009u32);
    lost(&device, &context, result, CUDA_ERROR_ILLEGAL_ADDRESS, "selftest_dynamic_shared");

    let refused = |result: Result<(), DriverError>, why: &str| {
        assert_eq!(result, Err(DriverError(CUDA_ERROR_INVALID_VALUE)));
        assert!(device.message().contains(why), "{}", device.message());
        assert_eq!(context.synchronize(), Ok(()), "nothing is lost");
    };
    let more = (48 << 10) + 16;
    refused(outcome!(context, "selftest_dynamic_shared", dynamic(more), &mut out, &more), "its attribute allows 49152");
    refused(outcome!(context, "selftest_static_shared", dynamic(16 << 10), &mut out), "of static and 16384 of dynamic");
    let function = kernel(&context, "selftest_dynamic_shared");
    let attribute = cudarc::driver::sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
    function.set_attribute(attribute, more as i32).expect("as much as the device has");
    let mut builder = stream.launch_builder(&function);
    builder.arg(&mut out).arg(&more);
    // SAFETY: the kernel's arguments.
    assert_eq!(unsafe { builder.launch(dynamic(more)) }.map(|_| ()), Ok(()));
    assert_eq!(stream.clone_dtoh(&out).expect("copies")[0], more);
    assert_eq!(function.set_attribute(attribute, 128 << 10), Err(DriverError(CUDA_ERROR_INVALID_VALUE)));
}

#[test]
fn launches_of_impossible_shapes() {
    let (device, context, stream) = quiet_device();
    let mut out = stream.alloc_zeros::<f32>(64).expect("allocates");
    let shapes = [
        ((1, 1, 1), (1025, 1, 1), "at most 1024"),
        ((1, 1, 1), (1, 1, 65), "64 along z"),
        ((1, 1, 1), (0, 1, 1), "a block of (0, 1, 1)"),
        ((1, 1, 1), (64, 1, 1), "__launch_bounds__ say 32"),
        ((0, 1, 1), (32, 1, 1), "a grid of (0, 1, 1)"),
        ((1, 65536, 1), (32, 1, 1), "a grid of (1, 65536, 1)"),
        ((1, 1, 65536), (32, 1, 1), "a grid of (1, 1, 65536)"),
        ((1 << 31, 1, 1), (32, 1, 1), "a grid of (2147483648, 1, 1)"),
    ];
    for (grid_dim, block_dim, why) in shapes {
        let config = LaunchConfig { grid_dim, block_dim, shared_mem_bytes: 0 };
        let result = outcome!(context, "selftest_write", config, &mut out, &0u64, &1f32);
        assert_eq!(result, Err(DriverError(CUDA_ERROR_INVALID_VALUE)), "{grid_dim:?} {block_dim:?}");
        assert!(device.message().contains(why), "{}", device.message());
        assert_eq!(context.synchronize(), Ok(()), "nothing is lost");
    }
    assert!(common::module(&context).load_function("no_such_kernel").is_err());
    let text = cudarc::nvrtc::Ptx::from_binary(b"neither a fatbin nor a cubin".to_vec());
    assert!(context.load_module(text).is_err());
}
