//! Copies to a device and back, through page-locked memory, in the order of one stream.
#![allow(unsafe_code)]

use std::sync::Arc;

use super::device::Device;
use super::memory::{DeviceMemory, Pinned, Stream};
use crate::error::{Error, Result};

/// A stream with the host memory that its copies need. Whoever calls has made the device's context current.
pub(super) struct Exchange {
    to_device: Pinned,
    from_device: Pinned,
    /// Words of the last [`Self::read`].
    read: usize,
    /// Whether anything was enqueued since the stream was last waited for. Until then page-locked memory is not touched.
    busy: bool,
    stream: Stream,
}

impl Exchange {
    /// On a stream of its own.
    ///
    /// # Errors
    /// `Unavailable` without memory for it.
    pub(super) fn new(device: &Arc<Device>) -> Result<Self> {
        Ok(Self {
            to_device: Pinned::empty(device),
            from_device: Pinned::empty(device),
            read: 0,
            busy: false,
            stream: Stream::new(device)?,
        })
    }

    /// The stream, to enqueue other work in. [`Self::wait`] waits for that only after a copy; [`Self::drain`] always.
    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Makes room for copies of so many words each, so that none allocates later.
    ///
    /// # Errors
    /// `Unavailable` when memory cannot be page-locked.
    pub(super) fn reserve(&mut self, written: usize, read: usize) -> Result<()> {
        self.wait()?;
        self.to_device.grow(written)?;
        self.from_device.grow(read)
    }

    /// Enqueues a copy of `words` words to `memory` from byte `offset` on, after `fill` has written them. Waits first
    /// for what is enqueued.
    ///
    /// # Errors
    /// Of `fill`; `Unavailable` when memory cannot be page-locked; of anything that was enqueued.
    pub(super) fn write(
        &mut self,
        memory: &DeviceMemory,
        offset: usize,
        words: usize,
        fill: impl FnOnce(&mut [u32]) -> Result<()>,
    ) -> Result<()> {
        within(memory, offset, words)?;
        self.wait()?;
        self.to_device.grow(words)?;
        let source = &mut self.to_device.words_mut()[..words];
        fill(source)?;
        self.busy = true;
        // SAFETY: the place is in `memory`; the source is page-locked and not touched until the stream was waited for.
        unsafe { self.stream.write(memory.address() + offset as u64, source) }
    }

    /// Enqueues a copy of `words` words of `memory` from byte `offset` on; [`Self::received`] has them after the next
    /// [`Self::wait`].
    ///
    /// # Errors
    /// `Unavailable` when memory cannot be page-locked.
    pub(super) fn read(&mut self, memory: &DeviceMemory, offset: usize, words: usize) -> Result<()> {
        within(memory, offset, words)?;
        if words > self.from_device.words().len() {
            self.wait()?;
            self.from_device.grow(words)?;
        }
        self.read = words;
        self.busy = true;
        // SAFETY: the words are in `memory`; the target is page-locked and not touched until the stream was waited for.
        unsafe { self.stream.read(memory.address() + offset as u64, &mut self.from_device.words_mut()[..words]) }
    }

    /// Waits until everything that was enqueued is done.
    ///
    /// # Errors
    /// Of anything that was enqueued.
    pub(super) fn wait(&mut self) -> Result<()> {
        if self.busy {
            self.stream.wait()?;
            self.busy = false;
        }
        Ok(())
    }

    /// Waits for everything in the stream, copies or not.
    ///
    /// # Errors
    /// Of anything that was enqueued.
    pub(super) fn drain(&mut self) -> Result<()> {
        self.busy = true;
        self.wait()
    }

    /// What the last [`Self::read`] has brought.
    ///
    /// # Errors
    /// Of anything that was enqueued.
    pub(super) fn received(&mut self) -> Result<&[u32]> {
        self.wait()?;
        Ok(&self.from_device.words()[..self.read])
    }

    /// After an error: waits until nothing that was enqueued can touch memory any more, whatever came of it.
    pub(super) fn settle(&mut self) {
        self.stream.settle();
        self.busy = false;
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        if self.busy {
            self.settle();
        }
    }
}

fn within(memory: &DeviceMemory, offset: usize, words: usize) -> Result<()> {
    match words.checked_mul(4).and_then(|bytes| bytes.checked_add(offset)) {
        Some(end) if end <= memory.bytes() => Ok(()),
        _ => Err(Error::internal("a copy does not fit the device memory that it is for")),
    }
}
