//! Working memory of the threads of one runner.

use std::sync::{Mutex, PoisonError, TryLockError};

/// One `T` for each thread that may work at once. A task takes any free one.
pub(super) struct Slots<T>(Vec<Mutex<T>>);

impl<T> Slots<T> {
    pub(super) fn new(slots: usize, make: impl Fn() -> T) -> Self {
        Self((0..slots).map(|_| Mutex::new(make())).collect())
    }

    /// Calls `f` with a free slot. There is one, as long as no more threads work than there are slots; should there
    /// be more, they wait.
    pub(super) fn with<R>(&self, f: impl FnOnce(&mut T) -> R) -> R {
        for slot in &self.0 {
            match slot.try_lock() {
                Ok(mut free) => return f(&mut free),
                // A panic left it: it holds no invariant.
                Err(TryLockError::Poisoned(free)) => return f(&mut free.into_inner()),
                Err(TryLockError::WouldBlock) => {}
            }
        }
        f(&mut self.0[0].lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// All of them, between passes.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = &mut T> {
        self.0.iter_mut().map(|slot| slot.get_mut().unwrap_or_else(PoisonError::into_inner))
    }
}
