//! Lazy streams: what the host or another stream does not wait for is not there.

mod common;

use std::sync::Arc;

use common::{blocks, kernel};
use cudarc::driver::result::{event, free_host, malloc_host, memcpy_dtoh_async, memcpy_htod_async};
use cudarc::driver::sys::CUevent_flags::CU_EVENT_DEFAULT;
use cudarc::driver::sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
use cudarc::driver::{CudaContext, CudaFunction, CudaStream, DevicePtr, DevicePtrMut, PushKernelArg, result};

const N: usize = 64;

/// Pinned memory for `N` numbers.
struct Pinned(*mut f32);

impl Pinned {
    fn new(value: f32) -> Self {
        // SAFETY: a context is current on this thread; N numbers fit.
        unsafe {
            let memory = malloc_host(N * 4, 0).expect("allocates").cast::<f32>();
            std::slice::from_raw_parts_mut(memory, N).fill(value);
            Self(memory)
        }
    }

    fn numbers(&mut self) -> &mut [f32] {
        // SAFETY: N numbers that `new` has filled. The device may write them meanwhile: on the thread that waits.
        unsafe { std::slice::from_raw_parts_mut(self.0, N) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: from malloc_host, freed once.
        unsafe { free_host(self.0.cast()) }.expect("frees");
    }
}

fn double(stream: &CudaStream, f: &CudaFunction, x: u64) {
    let mut builder = stream.launch_builder(f);
    builder.arg(&x).arg(&x).arg(&x).arg(&1f32).arg(&(N as u32));
    // SAFETY: the kernel's arguments, N numbers.
    unsafe { builder.launch(blocks(1, 64)) }.expect("launches");
}

fn new_stream(context: &Arc<CudaContext>) -> Arc<CudaStream> {
    context.new_stream().expect("a stream")
}

#[test]
fn results_come_when_the_host_waits() {
    let device = cuda_device::exclusive();
    let context = CudaContext::new(0).expect("a device");
    // SAFETY: nothing in this test relies on cudarc's own synchronization.
    unsafe { context.disable_event_tracking() };
    let stream = new_stream(&context);
    let f = kernel(&context, "selftest_axpy");
    let mut memory = stream.alloc_zeros::<f32>(N).expect("allocates");
    let address = memory.device_ptr_mut(&stream).0;
    for lazy in [true, false] {
        device.set_lazy(lazy);
        let (mut input, mut output) = (Pinned::new(1.0), Pinned::new(0.0));
        // SAFETY: N numbers in device memory and in pinned memory, which live until the stream is done.
        unsafe { memcpy_htod_async(address, input.numbers(), stream.cu_stream()) }.expect("copies");
        double(&stream, &f, address);
        // SAFETY: as above.
        unsafe { memcpy_dtoh_async(output.numbers(), address, stream.cu_stream()) }.expect("copies");
        // A host that does not wait reads what was there; one that reuses its input too early changes what is computed.
        assert_eq!(output.numbers()[0], if lazy { 0.0 } else { 2.0 });
        input.numbers().fill(5.0);
        stream.synchronize().expect("waits");
        assert_eq!(output.numbers(), [if lazy { 10.0 } else { 2.0 }; N]);
    }
}

#[test]
fn streams_run_ahead_of_those_they_do_not_wait_for() {
    let device = cuda_device::exclusive();
    let context = CudaContext::new(0).expect("a device");
    // SAFETY: as above.
    unsafe { context.disable_event_tracking() };
    let (first, second) = (new_stream(&context), new_stream(&context));
    let f = kernel(&context, "selftest_axpy");
    let memory = first.clone_htod(&[1f32; N]).expect("copies");
    let address = memory.device_ptr(&first).0;
    first.synchronize().expect("waits");
    device.set_lazy(true);
    for (waits, expected) in [(false, 1.0), (true, 4.0)] {
        let mut output = Pinned::new(0.0);
        double(&first, &f, address);
        if waits {
            let mark = event::create(CU_EVENT_DEFAULT).expect("an event");
            // SAFETY: live streams and a live event, destroyed once; N numbers in both memories.
            unsafe {
                event::record(mark, first.cu_stream()).expect("records");
                result::stream::wait_event(second.cu_stream(), mark, CU_EVENT_WAIT_DEFAULT).expect("waits");
                assert!(event::query(mark).is_err(), "not yet");
                memcpy_dtoh_async(output.numbers(), address, second.cu_stream()).expect("copies");
                second.synchronize().expect("waits");
                event::query(mark).expect("done");
                event::destroy(mark).expect("destroys");
            }
        } else {
            // SAFETY: as above.
            unsafe { memcpy_dtoh_async(output.numbers(), address, second.cu_stream()) }.expect("copies");
            second.synchronize().expect("waits");
        }
        assert_eq!(output.numbers()[0], expected);
        first.synchronize().expect("waits");
    }
}

#[test]
fn pageable_memory_is_read_and_written_before_a_copy_returns() {
    let device = cuda_device::exclusive();
    let context = CudaContext::new(0).expect("a device");
    let stream = new_stream(&context);
    device.set_lazy(true);
    let mut host = vec![3f32; N];
    let memory = stream.clone_htod(&host).expect("copies");
    host.fill(4.0);
    let mut back = vec![0f32; N];
    stream.memcpy_dtoh(&memory, &mut back).expect("copies");
    assert_eq!(back, [3.0; N]);
    let failing = kernel(&context, "selftest_write");
    let mut builder = stream.launch_builder(&failing);
    builder.arg(&memory).arg(&(1u64 << 30)).arg(&1f32);
    device.set_verbose(false);
    // SAFETY: the write beyond the memory is what is tested.
    unsafe { builder.launch(blocks(1, 32)) }.expect("nothing is wrong yet");
    assert!(stream.synchronize().is_err(), "the error comes when the host waits");
    device.recover();
    let _ = context.check_err();
}
