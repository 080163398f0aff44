//! Accounting, running out of memory, injected faults, leaks.

mod common;

use common::{blocks, kernel};
use cuda_device::{Exclusive, PINNED};
use cudarc::driver::sys::cudaError_enum::{CUDA_ERROR_ILLEGAL_ADDRESS, CUDA_ERROR_OUT_OF_MEMORY};
use cudarc::driver::{CudaContext, DevicePtr, DriverError, PushKernelArg};

#[test]
fn each_device_has_its_own_memory_and_runs_out_of_it() {
    let device = cuda_device::exclusive();
    device.set_verbose(false);
    device.set_memory(1 << 20);
    let contexts = [0, 1].map(|number| CudaContext::new(number).expect("two devices"));
    let stream = contexts[0].default_stream();
    assert_eq!(contexts[0].mem_get_info().expect("known"), (1 << 20, 1 << 20));
    let most = stream.alloc_zeros::<u8>(1_000_000).expect("allocates");
    assert_eq!((device.allocated(0), device.allocated(1)), (1_000_000, 0));
    assert_eq!(contexts[0].mem_get_info().expect("known").0, (1 << 20) - 1_000_000);
    let more = stream.alloc_zeros::<u8>(100_000).map(|_| ());
    assert_eq!(more, Err(DriverError(CUDA_ERROR_OUT_OF_MEMORY)));
    assert!(device.message().contains("1000000 of 1048576 bytes are in use"), "{}", device.message());
    contexts[1].default_stream().alloc_zeros::<u8>(100_000).expect("the other device has memory");
    drop(most);
    stream.alloc_zeros::<u8>(100_000).expect("there is memory again");
    // SAFETY: nothing reads it.
    let pinned = unsafe { contexts[0].alloc_pinned::<u8>(4096) }.expect("allocates");
    assert_eq!(device.allocated(PINNED), 4096);
    drop(pinned);
    assert_eq!((device.allocated(0), device.allocated(1), device.allocated(PINNED)), (0, 0, 0));
}

#[test]
fn fresh_memory_is_not_a_number() {
    let device = cuda_device::exclusive();
    let stream = CudaContext::new(1).expect("a device").default_stream();
    // SAFETY: any bytes are a u32.
    let fresh = || stream.clone_dtoh(&unsafe { stream.alloc::<u32>(1000) }.expect("allocates")).expect("copies");
    assert!(fresh().iter().all(|&bits| bits == u32::MAX && f32::from_bits(bits).is_nan()));
    device.set_poison(false);
    assert!(fresh().iter().all(|&bits| bits == 0));
}

#[test]
fn host_code_cannot_follow_an_address_of_the_device() {
    let device = cuda_device::shared();
    if !device.protects_memory() {
        eprintln!("this machine has no memory protection keys: not tested");
        return;
    }
    let context = CudaContext::new(0).expect("a device");
    let stream = context.default_stream();
    let memory = stream.clone_htod(&[7u32; 16]).expect("copies");
    let address = std::ptr::with_exposed_provenance::<u32>(memory.device_ptr(&stream).0 as usize);
    // SAFETY: memory that is pinned belongs to both sides.
    let mut pinned = unsafe { context.alloc_pinned::<u32>(16) }.expect("allocates");
    pinned.as_mut_slice().expect("host memory").fill(1);
    let mut status = 0;
    // SAFETY: the child does nothing but one access, with which it ends; the parent waits for it.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            address.read_volatile();
            libc::_exit(0);
        }
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
    }
    assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGSEGV, "status {status}");
    assert_eq!(stream.clone_dtoh(&memory).expect("copies back"), [7; 16]);
}

/// All that a user does with the device; gives back what it took in any case.
fn use_device() -> Result<Vec<f32>, DriverError> {
    let context = CudaContext::new(0)?;
    let stream = context.new_stream()?;
    let x = stream.clone_htod(&[1f32; 64])?;
    let mut out = stream.alloc_zeros::<f32>(64)?;
    let mut image = 0xba55_ed50u32.to_le_bytes().to_vec();
    image.resize(64, 0);
    let module = context.load_module(cudarc::nvrtc::Ptx::from_binary(image))?;
    let f = module.load_function("selftest_axpy")?;
    // SAFETY: the kernel's arguments, 64 numbers.
    unsafe { stream.launch_builder(&f).arg(&mut out).arg(&x).arg(&x).arg(&2f32).arg(&64u32).launch(blocks(1, 64)) }?;
    stream.clone_dtoh(&out)
}

fn assert_nothing_left(device: &Exclusive) {
    assert_eq!((device.allocated(0), device.allocated(PINNED)), (0, 0));
    for kind in ["contexts", "streams", "events", "modules"] {
        assert_eq!(device.live(kind), 0, "{kind}");
    }
}

#[test]
fn any_call_fails_on_demand() {
    let device = cuda_device::exclusive();
    device.forget_calls();
    assert_eq!(use_device(), Ok(vec![3.0; 64]));
    assert_nothing_left(&device);
    let calls = device.all_calls();
    assert_eq!((calls["kernel selftest_axpy"], calls["cuLaunchKernel"], device.calls("cuModuleLoadData")), (1, 1, 1));
    // Each call of the way there, by its name.
    for name in ["cuInit", "cuDevicePrimaryCtxRetain", "cuStreamCreate", "cuMemAllocAsync", "cuLaunchKernel"] {
        device.fail(name, 1, 2);
        assert_eq!(use_device(), Err(DriverError(CUDA_ERROR_OUT_OF_MEMORY)), "{name}");
        assert!(device.message().contains(name), "{}", device.message());
        assert_eq!(device.faults_left(), 0);
        assert_nothing_left(&device);
        assert_eq!(use_device(), Ok(vec![3.0; 64]), "{name}: the next one works");
    }
    // Any call, counted over all names; the fault that never comes is told.
    device.fail("*", 3, 2);
    assert!(use_device().is_err());
    device.fail("*", 1_000_000, 2);
    assert_eq!(use_device(), Ok(vec![3.0; 64]));
    assert_eq!(device.faults_left(), 1);
}

#[test]
fn a_lost_device_stays_lost_until_its_context_goes() {
    let device = cuda_device::exclusive();
    device.set_verbose(false);
    let context = CudaContext::new(0).expect("a device");
    let stream = context.default_stream();
    let memory = stream.alloc_zeros::<u8>(100).expect("allocates");
    device.fail("cuMemcpyDtoHAsync_v2", 1, 700);
    for _ in 0..2 {
        assert_eq!(stream.clone_dtoh(&memory), Err(DriverError(CUDA_ERROR_ILLEGAL_ADDRESS)));
    }
    drop((memory, stream, context));
    assert_nothing_left(&device);
    assert_eq!(use_device(), Ok(vec![3.0; 64]));
    // The other device does not notice.
    let other = CudaContext::new(1).expect("a device");
    device.lose(0, 719);
    assert_eq!(other.synchronize(), Ok(()));
    assert!(use_device().is_err());
}

#[test]
fn kernels_count_as_launched() {
    let device = cuda_device::exclusive();
    let context = CudaContext::new(0).expect("a device");
    let _ = kernel(&context, "selftest_axpy");
    let before = device.calls("kernel selftest_axpy");
    use_device().expect("works");
    assert_eq!(device.calls("kernel selftest_axpy"), before + 1);
}
