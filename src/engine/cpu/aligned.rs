//! Buffers whose first element lies at the start of a cache line, so that no vector load straddles two lines.
#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};

use crate::error::{Error, Result};

/// Plain numbers: any bytes are a value.
pub(super) trait Number: Copy + Send + Sync + 'static {}
impl Number for f32 {}
impl Number for u16 {}
impl Number for u8 {}
impl Number for i8 {}
impl Number for super::int8::RowScale {}

#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A growing buffer of numbers, all zero at first.
pub(super) struct Aligned<T: Number> {
    lines: Vec<Line>,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Number> Aligned<T> {
    pub(super) const fn new() -> Self {
        Self { lines: Vec::new(), len: 0, of: PhantomData }
    }

    /// A buffer of `len` zeros.
    ///
    /// # Errors
    /// `Unavailable` when there is no memory for it.
    pub(super) fn zeroed(len: usize) -> Result<Self> {
        let mut buffer = Self::new();
        buffer.grow(len)?;
        Ok(buffer)
    }

    /// Makes the buffer at least `len` long; its content is then any.
    ///
    /// # Errors
    /// `Unavailable` when there is no memory for it; the buffer is then empty.
    pub(super) fn grow(&mut self, len: usize) -> Result<()> {
        if len <= self.len {
            return Ok(());
        }
        let lines = len.checked_mul(size_of::<T>()).map(|bytes| bytes.div_ceil(64));
        // The old content goes first: never two of a size at once.
        *self = Self::new();
        let reserved = lines.map(|lines| self.lines.try_reserve_exact(lines).map(|()| lines));
        let Some(Ok(lines)) = reserved else {
            return Err(Error::unavailable("out of memory: the CPU engine's working memory cannot be allocated"));
        };
        self.lines.resize(lines, Line([0; 64]));
        self.len = len;
        Ok(())
    }
}

impl<T: Number> Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        // SAFETY: `lines` holds at least `len` elements' bytes, initialized, of a type that any bytes are a value of.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.len) }
    }
}

impl<T: Number> DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and `self` is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.len) }
    }
}
