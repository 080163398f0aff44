//! What an instance owns on its device: a stream, memory there, and page-locked host memory to copy from and to.
#![allow(unsafe_code)]

use std::ptr::{self, NonNull};
use std::sync::{Arc, OnceLock};

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUevent_flags, CUresult};

use super::device::Device;
use crate::error::{Error, Result};

/// What every place in an arena is aligned to: what cublasLt assumes of pointers, and more than any kernel needs.
pub(super) const ALIGNMENT: usize = 256;

/// Memory of a device.
pub(super) struct DeviceMemory {
    device: Arc<Device>,
    address: u64,
    bytes: usize,
}

impl DeviceMemory {
    /// None yet.
    pub(super) fn empty(device: &Arc<Device>) -> Self {
        Self { device: Arc::clone(device), address: 0, bytes: 0 }
    }

    /// `bytes` of undefined content.
    ///
    /// # Errors
    /// `Unavailable` when the device has no more memory.
    pub(super) fn new(device: &Arc<Device>, what: &str, bytes: usize) -> Result<Self> {
        let mut memory = Self::empty(device);
        memory.grow(what, bytes)?;
        Ok(memory)
    }

    /// Makes it at least `bytes` large. Its content is undefined afterwards where it grew. After an error it is empty,
    /// so that what was in the way is free for the next attempt.
    ///
    /// # Errors
    /// `Unavailable` when the device has no more memory.
    pub(super) fn grow(&mut self, what: &str, bytes: usize) -> Result<()> {
        if bytes <= self.bytes {
            return Ok(());
        }
        self.free();
        let _current = self.device.make_current()?;
        let bytes = bytes.next_multiple_of(ALIGNMENT);
        // SAFETY: a context is current; what is returned is not read before it is written.
        self.address = unsafe { result::malloc_sync(bytes) }
            .map_err(|error| self.device.error(&format!("{bytes} bytes for {what}"), error))?;
        self.bytes = bytes;
        Ok(())
    }

    /// Gives it back to the device.
    pub(super) fn free(&mut self) {
        if self.bytes > 0 {
            let address = self.address;
            // SAFETY: allocated by `grow`. Work that uses it has been waited for: every pass ends with that, or, after
            // an error, the runner does it before it drops the memory.
            self.device.give_back(|| unsafe { result::free_sync(address) });
        }
        (self.address, self.bytes) = (0, 0);
    }

    /// The device address of its first byte.
    pub(super) fn address(&self) -> u64 {
        self.address
    }

    /// Its size.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        self.free();
    }
}

/// Page-locked host memory, from which copies to the device and back run beside the CPU's own work. Not
/// write-combined: results are read from it.
pub(super) struct Pinned {
    device: Arc<Device>,
    /// `words` initialized words, of any alignment that malloc gives and better.
    data: Option<NonNull<u32>>,
    words: usize,
}

// SAFETY: ordinary memory that this value owns.
unsafe impl Send for Pinned {}

impl Pinned {
    /// None yet.
    pub(super) fn empty(device: &Arc<Device>) -> Self {
        Self { device: Arc::clone(device), data: None, words: 0 }
    }

    /// Makes it at least `words` long; after an error it is empty.
    ///
    /// # Errors
    /// `Unavailable` when memory cannot be page-locked.
    pub(super) fn grow(&mut self, words: usize) -> Result<()> {
        if words <= self.words {
            return Ok(());
        }
        self.free();
        let _current = self.device.make_current()?;
        let words = words.next_power_of_two().max(1024);
        let bytes = words * size_of::<u32>();
        // SAFETY: a context is current; zeroed before a reference to it is made.
        let data = unsafe { result::malloc_host(bytes, 0) }
            .map_err(|error| self.device.error(&format!("{bytes} bytes of page-locked memory"), error))?;
        let Some(data) = NonNull::new(data.cast::<u32>()) else {
            return Err(Error::unavailable("the CUDA driver gives no page-locked memory"));
        };
        // SAFETY: as many bytes, just allocated.
        unsafe { ptr::write_bytes(data.as_ptr(), 0, words) };
        (self.data, self.words) = (Some(data), words);
        Ok(())
    }

    fn free(&mut self) {
        if let Some(data) = self.data.take() {
            // SAFETY: allocated by `grow`; no copy from or to it is under way, as of `DeviceMemory::free`.
            self.device.give_back(|| unsafe { result::free_host(data.as_ptr().cast()) });
        }
        self.words = 0;
    }

    /// All words.
    pub(super) fn words(&self) -> &[u32] {
        // SAFETY: as many initialized words; the borrow keeps writers out. Copies of the device into it are waited for
        // before this is called (`Stream::read` borrows mutably, and the runner synchronizes).
        self.data.map_or(&[], |data| unsafe { std::slice::from_raw_parts(data.as_ptr(), self.words) })
    }

    /// All words.
    pub(super) fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: as above, and nobody else has them.
        self.data.map_or(&mut [], |data| unsafe { std::slice::from_raw_parts_mut(data.as_ptr(), self.words) })
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        self.free();
    }
}

/// A queue of work on a device, and the event by which its end is waited for without a spinning thread.
pub(super) struct Stream {
    device: Arc<Device>,
    raw: sys::CUstream,
    done: Event,
}

// SAFETY: the driver allows a stream to be used from any thread that has the context current.
unsafe impl Send for Stream {}

impl Stream {
    /// A stream that does not wait for the default one.
    ///
    /// # Errors
    /// `Unavailable` without memory for it.
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
        let done = Event::new(
            device,
            CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 | CUevent_flags::CU_EVENT_DISABLE_TIMING as u32,
        )?;
        let _current = device.make_current()?;
        let raw = result::stream::create(result::stream::StreamKind::NonBlocking)
            .map_err(|error| device.error("making a stream", error))?;
        Ok(Self { device: Arc::clone(device), raw, done })
    }

    /// For launches.
    pub(super) fn raw(&self) -> sys::CUstream {
        self.raw
    }

    /// Copies `words` to `address` when what was enqueued before is done.
    ///
    /// # Safety
    /// `address` has room for them; `words` are page-locked and stay unchanged until the stream is synchronized.
    pub(super) unsafe fn write(&self, address: u64, words: &[u32]) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { result::memcpy_htod_async(address, words, self.raw) }
            .map_err(|error| self.device.error("copying to the device", error))
    }

    /// Copies from `address` to `words` when what was enqueued before is done.
    ///
    /// # Safety
    /// As many words are there; `words` are page-locked and left alone until the stream is synchronized.
    pub(super) unsafe fn read(&self, address: u64, words: &mut [u32]) -> Result<()> {
        // SAFETY: by this function's contract.
        unsafe { result::memcpy_dtoh_async(words, address, self.raw) }
            .map_err(|error| self.device.error("copying from the device", error))
    }

    /// Waits, asleep, until everything that was enqueued is done.
    ///
    /// # Errors
    /// Of anything that was enqueued.
    pub(super) fn wait(&self) -> Result<()> {
        let fail = |error| self.device.error("waiting for the device", error);
        self.done.record(self).map_err(fail)?;
        // SAFETY: a live event.
        unsafe { result::event::synchronize(self.done.raw) }.map_err(fail)
    }

    /// After an error: waits until nothing that was enqueued can touch memory any more, whatever came of it.
    pub(super) fn settle(&self) {
        // SAFETY: a live stream.
        self.device.give_back(|| unsafe { result::stream::synchronize(self.raw) });
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        let raw = self.raw;
        // SAFETY: ours, destroyed once; on error it is still ours.
        self.device.give_back(|| unsafe { result::stream::destroy(raw) });
    }
}

/// A mark in a stream.
pub(super) struct Event {
    device: Arc<Device>,
    raw: sys::CUevent,
}

// SAFETY: as of `Stream`.
unsafe impl Send for Event {}

impl Event {
    fn new(device: &Arc<Device>, flags: u32) -> Result<Self> {
        let _current = device.make_current()?;
        let mut raw = ptr::null_mut();
        // SAFETY: a context is current; a valid place to write to.
        unsafe { sys::cuEventCreate(&mut raw, flags) }
            .result()
            .map_err(|error| device.error("making an event", error))?;
        Ok(Self { device: Arc::clone(device), raw })
    }

    /// An event whose time can be read.
    ///
    /// # Errors
    /// `Unavailable` without memory for it.
    pub(super) fn timed(device: &Arc<Device>) -> Result<Self> {
        Self::new(device, CUevent_flags::CU_EVENT_DEFAULT as u32)
    }

    /// Marks the end of what is in the stream now.
    pub(super) fn record(&self, stream: &Stream) -> std::result::Result<(), DriverError> {
        // SAFETY: both are live and of one device.
        unsafe { result::event::record(self.raw, stream.raw) }
    }

    /// Milliseconds from this event to `end`; waits for both.
    pub(super) fn milliseconds_to(&self, end: &Self) -> std::result::Result<f32, DriverError> {
        type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> CUresult;
        static ELAPSED: OnceLock<Option<Elapsed>> = OnceLock::new();
        // Under its name of CUDA 12.8 and later, or the one before: cudarc knows only the former.
        let find = || {
            let names = ["cuEventElapsedTime_v2", "cuEventElapsedTime"];
            // SAFETY: the driver is open, and both names have this type.
            names.iter().find_map(|name| unsafe { sys::culib().get::<Elapsed>(name.as_bytes()).ok().map(|f| *f) })
        };
        let Some(elapsed) = ELAPSED.get_or_init(find) else {
            return Err(DriverError(CUresult::CUDA_ERROR_NOT_FOUND));
        };
        let mut milliseconds = 0.0;
        // SAFETY: live events that were recorded; a valid place to write to.
        unsafe {
            result::event::synchronize(end.raw)?;
            elapsed(&mut milliseconds, self.raw, end.raw).result()?;
        }
        Ok(milliseconds)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        let raw = self.raw;
        // SAFETY: ours, destroyed once; on error it is still ours.
        self.device.give_back(|| unsafe { result::event::destroy(raw) });
    }
}
