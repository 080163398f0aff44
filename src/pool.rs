//! The one thread pool of the process, shared by all models and instances, for tokenization and the CPU engine.
//!
//! The pool bounds how many threads *compute*, not how many exist. It has as many permits as the machine has threads
//! for us. A thread that calls in takes one for as long as its [`Team`] lives; helper threads join a team only while a
//! permit is free, and leave at the end of a task when another caller waits for one. So two passes on two cores
//! each compute alone, with no synchronization between them, and one text alone gets all cores.
//!
//! A helper that has joined a team spins for at most [`SPIN`] for the team's next job, since the jobs of one text are
//! microseconds apart; outside of a team it sleeps.
#![allow(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a thread waits awake inside a running team, before it sleeps.
const SPIN: Duration = Duration::from_micros(30);

/// Threads that help whoever calls [`Pool::for_each`] or [`Pool::team`].
pub struct Pool {
    inner: Arc<Inner>,
    helpers: Vec<JoinHandle<()>>,
}

struct Inner {
    /// Number of permits.
    threads: usize,
    /// Permits taken. Written under `state`; read without it to see whether calling a helper can help.
    running: AtomicUsize,
    /// Callers that wait for a permit. Written under `state`.
    waiting: AtomicUsize,
    state: Mutex<State>,
    /// Helpers sleep here.
    work: Condvar,
    /// Callers without a permit sleep here.
    permit: Condvar,
}

#[derive(Default)]
struct State {
    teams: Vec<Arc<Shared>>,
    shutdown: bool,
    /// Callers get permits in the order in which they came: the next ticket to give, the next one to serve.
    next_ticket: usize,
    serving: usize,
}

/// What a team's caller and helpers share.
struct Shared {
    /// Helpers that may be in the team at once.
    helpers: usize,
    /// Helpers in the team.
    members: AtomicUsize,
    /// Tasks of the current job that nobody has claimed. A job is only touched by who has claimed a task of it and has
    /// not counted it as done, so a helper that comes late finds 0 here and touches nothing.
    unclaimed: AtomicUsize,
    /// Tasks of the current job that have ended.
    done: AtomicUsize,
    closed: AtomicBool,
    job: UnsafeCell<Job>,
    /// The first panic of the current job in a helper.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    caller: Thread,
}

/// A borrowed `Fn(usize) + Sync` with its type erased.
#[derive(Clone, Copy)]
struct Job {
    tasks: usize,
    data: *const (),
    call: unsafe fn(*const (), usize),
}

// SAFETY: `job` is the only field that is not Sync by itself. The caller writes it only while all tasks of the job
// before are done (`done` read with Acquire), and others read it only after they claimed a task (Acquire on `unclaimed`,
// which was stored after the write) and before they count it as done (Release on `done`). What it points to is Sync.
unsafe impl Sync for Shared {}
// SAFETY: see above; nothing in it is bound to a thread.
unsafe impl Send for Shared {}

thread_local! {
    /// The pool whose permit this thread holds.
    static HOLDS: Cell<*const Inner> = const { Cell::new(std::ptr::null()) };
    /// Whether this thread is inside a task: calls from there run on this thread alone.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// Locks do not poison: no lock of this file is held while foreign code runs.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Pool {
    /// The process's pool. It is made at the first call with that number of threads (the calling thread counts as
    /// one; 0 means [`Pool::default_threads`]), later calls return the same one, and its threads are joined when the
    /// last handle is dropped.
    pub fn shared(threads: usize) -> Arc<Self> {
        static SHARED: Mutex<Weak<Pool>> = Mutex::new(Weak::new());
        let mut shared = lock(&SHARED);
        if let Some(pool) = shared.upgrade() {
            return pool;
        }
        let pool = Arc::new(Self::new(threads));
        *shared = Arc::downgrade(&pool);
        pool
    }

    /// The threads that this process may use at once, by its CPU set and its cgroup quota.
    pub fn default_threads() -> usize {
        std::thread::available_parallelism().map_or(1, usize::from)
    }

    /// A pool of its own, for tests and benchmarks.
    pub fn new(threads: usize) -> Self {
        let threads = if threads == 0 { Self::default_threads() } else { threads };
        let inner = Arc::new(Inner {
            threads,
            running: AtomicUsize::new(0),
            waiting: AtomicUsize::new(0),
            state: Mutex::default(),
            work: Condvar::new(),
            permit: Condvar::new(),
        });
        // A caller always holds one permit, so one helper fewer is enough. A machine that refuses more threads gets
        // fewer helpers: callers do all the work that nobody helps with.
        let helper = |i| {
            let inner = Arc::clone(&inner);
            std::thread::Builder::new().name(format!("rust-pool-{i}")).spawn(move || inner.help()).ok()
        };
        let helpers = (0..threads - 1).map_while(helper).collect();
        Self { inner, helpers }
    }

    /// How many threads may compute at once.
    pub fn threads(&self) -> usize {
        self.inner.threads
    }

    /// Calls `f(0) .. f(tasks - 1)`, on at most `limit` threads of the pool, the caller among them, and returns when
    /// all are done. A panic of `f` goes on in the caller after all tasks that were begun have ended. Called from
    /// inside a task, it runs on that task's thread alone.
    pub fn for_each(&self, limit: usize, tasks: usize, f: impl Fn(usize) + Sync) {
        self.team(limit).for_each(tasks, f);
    }

    /// Takes a permit (waits for one if all are taken) and gives a handle to run jobs one after another on at most
    /// `limit` threads. A thread that already holds one takes no other.
    pub fn team(&self, limit: usize) -> Team<'_> {
        let pool = &*self.inner;
        let owns_permit = !std::ptr::eq(HOLDS.get(), pool);
        let held_before = HOLDS.get();
        if owns_permit {
            pool.acquire();
            HOLDS.set(pool);
        }
        let limit = limit.clamp(1, pool.threads);
        Team { pool, limit, owns_permit, held_before, shared: Cell::new(None), on_this_thread: PhantomData }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        lock(&self.inner.state).shutdown = true;
        self.inner.work.notify_all();
        for helper in self.helpers.drain(..) {
            // A helper catches the panics of its tasks, so there is no other end to report.
            let _ = helper.join();
        }
    }
}

impl Inner {
    /// Takes a permit, first come, first served.
    fn acquire(&self) {
        let mut state = lock(&self.state);
        let ticket = state.next_ticket;
        state.next_ticket = ticket.wrapping_add(1);
        while self.running.load(Ordering::SeqCst) == self.threads || state.serving != ticket {
            // Helpers see this and leave their team after the task at hand.
            self.waiting.fetch_add(1, Ordering::SeqCst);
            state = self.permit.wait(state).unwrap_or_else(PoisonError::into_inner);
            self.waiting.fetch_sub(1, Ordering::SeqCst);
        }
        state.serving = ticket.wrapping_add(1);
        if self.running.fetch_add(1, Ordering::SeqCst) + 1 < self.threads && self.waiting.load(Ordering::SeqCst) > 0 {
            self.permit.notify_all();
        }
    }

    /// Gives a permit back to whoever can use it.
    fn release(&self, state: &State) {
        self.running.fetch_sub(1, Ordering::SeqCst);
        if self.waiting.load(Ordering::SeqCst) > 0 {
            self.permit.notify_all();
        } else if state.teams.iter().any(|team| team.wants_help()) {
            self.work.notify_one();
        }
    }

    /// The life of a helper thread.
    fn help(&self) {
        HOLDS.set(self);
        IN_TASK.set(true);
        let mut state = lock(&self.state);
        while !state.shutdown {
            let free = self.running.load(Ordering::SeqCst) < self.threads && self.waiting.load(Ordering::SeqCst) == 0;
            let Some(team) = state.teams.iter().find(|team| free && team.wants_help()).map(Arc::clone) else {
                state = self.work.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            self.running.fetch_add(1, Ordering::SeqCst);
            team.members.fetch_add(1, Ordering::SeqCst);
            drop(state);
            team.join_in(&self.waiting);
            state = lock(&self.state);
            team.members.fetch_sub(1, Ordering::SeqCst);
            self.release(&state);
        }
    }
}

impl Shared {
    fn wants_help(&self) -> bool {
        self.unclaimed.load(Ordering::SeqCst) > 0 && self.members.load(Ordering::SeqCst) < self.helpers
    }

    /// Claims a task: its job and its index.
    fn claim(&self) -> Option<(Job, usize)> {
        let unclaimed =
            self.unclaimed.fetch_update(Ordering::AcqRel, Ordering::Acquire, |left| left.checked_sub(1)).ok()?;
        // SAFETY: this thread has claimed a task and not counted it as done: nobody writes the job (see `Sync`).
        let job = unsafe { *self.job.get() };
        Some((job, job.tasks - unclaimed))
    }

    /// A helper's stay in the team: until there is no job for [`SPIN`], the team ends or another caller waits.
    fn join_in(&self, waiting: &AtomicUsize) {
        loop {
            while let Some((job, index)) = self.claim() {
                // SAFETY: the task is claimed and not done, so the caller still waits and the closure lives.
                let result = catch_unwind(AssertUnwindSafe(|| unsafe { (job.call)(job.data, index) }));
                if let Err(panic) = result {
                    lock(&self.panic).get_or_insert(panic);
                }
                // From here on the closure may be gone.
                if self.done.fetch_add(1, Ordering::Release) + 1 == job.tasks {
                    self.caller.unpark();
                }
                if waiting.load(Ordering::SeqCst) > 0 {
                    return;
                }
            }
            let ended = || self.closed.load(Ordering::Acquire) || waiting.load(Ordering::SeqCst) > 0;
            let called = spin(|| self.unclaimed.load(Ordering::Acquire) > 0 || ended());
            if !called || ended() {
                return;
            }
        }
    }
}

/// Waits awake until `ready`, at most [`SPIN`] long; whether it was.
fn spin(ready: impl Fn() -> bool) -> bool {
    let start = Instant::now();
    loop {
        for _ in 0..16 {
            if ready() {
                return true;
            }
            std::hint::spin_loop();
        }
        if start.elapsed() > SPIN {
            return false;
        }
    }
}

/// A caller's permit, and the helpers that it can call for one job after another.
pub struct Team<'p> {
    pool: &'p Inner,
    limit: usize,
    owns_permit: bool,
    held_before: *const Inner,
    /// Made at the first job that can use help.
    shared: Cell<Option<Arc<Shared>>>,
    /// A team belongs to the thread that made it: permits are counted by thread.
    on_this_thread: PhantomData<*const ()>,
}

impl Team<'_> {
    /// How many threads the team may have.
    pub fn limit(&self) -> usize {
        self.limit
    }

    /// As [`Pool::for_each`], within this team.
    pub fn for_each<F: Fn(usize) + Sync>(&self, tasks: usize, f: F) {
        if self.limit == 1 || tasks <= 1 || IN_TASK.get() {
            return (0..tasks).for_each(f);
        }
        let shared = self.shared.take().unwrap_or_else(|| self.open());
        let result = self.run(&shared, tasks, &f);
        self.shared.set(Some(shared));
        if let Err(panic) = result {
            resume_unwind(panic);
        }
    }

    /// Registers the team, so that helpers find it.
    fn open(&self) -> Arc<Shared> {
        unsafe fn nothing(_: *const (), _: usize) {}
        let shared = Arc::new(Shared {
            helpers: self.limit - 1,
            members: AtomicUsize::new(0),
            unclaimed: AtomicUsize::new(0),
            done: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            job: UnsafeCell::new(Job { tasks: 0, data: std::ptr::null(), call: nothing }),
            panic: Mutex::new(None),
            caller: std::thread::current(),
        });
        lock(&self.pool.state).teams.push(Arc::clone(&shared));
        shared
    }

    fn run<F: Fn(usize) + Sync>(&self, shared: &Shared, tasks: usize, f: &F) -> Result<(), Box<dyn Any + Send>> {
        unsafe fn call<F: Fn(usize)>(data: *const (), index: usize) {
            // SAFETY: `data` is the `&F` of the job, which outlives every claimed task.
            unsafe { (*data.cast::<F>())(index) }
        }
        // SAFETY: the job before is done (its `run` has returned) and `unclaimed` is 0: nobody reads the job now.
        unsafe { *shared.job.get() = Job { tasks, data: std::ptr::from_ref(f).cast(), call: call::<F> } };
        shared.done.store(0, Ordering::Relaxed);
        shared.unclaimed.store(tasks, Ordering::SeqCst);
        self.call_helpers(shared, tasks);

        let mut panic = None;
        IN_TASK.set(true);
        while let Some((_, index)) = shared.claim() {
            if let Err(payload) = catch_unwind(AssertUnwindSafe(|| f(index))) {
                panic.get_or_insert(payload);
            }
            shared.done.fetch_add(1, Ordering::Relaxed);
        }
        IN_TASK.set(false);
        // The borrow of `f` ends only after every task has: nothing between here and the end of the wait can unwind.
        let finished = || shared.done.load(Ordering::Acquire) == tasks;
        if !spin(finished) {
            while !finished() {
                std::thread::park();
            }
        }
        match panic.or_else(|| lock(&shared.panic).take()) {
            None => Ok(()),
            Some(panic) => Err(panic),
        }
    }

    /// Wakes as many helpers as the job and the free permits can use, beside those that are in the team already.
    fn call_helpers(&self, shared: &Shared, tasks: usize) {
        let useful = shared.helpers.min(tasks - 1).saturating_sub(shared.members.load(Ordering::SeqCst));
        let free = self.pool.threads - self.pool.running.load(Ordering::SeqCst);
        if useful.min(free) > 0 {
            // Under the lock, so that no helper is between its look at this team and its sleep.
            let _state = lock(&self.pool.state);
            (0..useful.min(free)).for_each(|_| self.pool.work.notify_one());
        }
    }
}

impl Drop for Team<'_> {
    fn drop(&mut self) {
        let shared = self.shared.take();
        if shared.is_none() && !self.owns_permit {
            return;
        }
        let mut state = lock(&self.pool.state);
        if let Some(shared) = shared {
            shared.closed.store(true, Ordering::Release);
            state.teams.retain(|team| !Arc::ptr_eq(team, &shared));
        }
        if self.owns_permit {
            HOLDS.set(self.held_before);
            self.pool.release(&state);
        }
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
