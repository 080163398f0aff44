//! The batch that the scheduler is forming, and what its payload holds already.
//!
//! A payload is what an instance executes as one batch. The scheduler fills it from the queue in scans: each wake-up
//! starts at the queue's head, with a new "batch" as far as the library is told. Two things follow that are not said:
//!
//! * A payload that is scheduled, and that no instance has taken yet, keeps growing by further scans. Each alone would
//!   have the whole budget.
//! * A scan whose requests were left waiting (a queue delay has not passed) is made again over the same requests.
//!
//! What is known: the place of the payload's `userp`, which no two successive payloads share (the server takes the next
//! one before it lets go of the last), and the address of each request, which nothing else can have while it lives, in
//! the queue or in a payload that is not executed. So a scan of the same payload that begins with the request that the
//! scan before it began with repeats that; one that begins with another adds to what that moved into the payload.
//!
//! Where that guess is wrong (the first request was cancelled, or one of higher priority came) the payload is thought
//! to hold more than it does, and closes early: batches are a hint, the backend holds the budget.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};

/// One thread at a time uses it. Atomics cost nothing here, and make a server that does otherwise get a wrong hint
/// instead of a data race.
pub(super) struct Pending {
    /// The place of the payload's `userp`.
    payload: AtomicUsize,
    /// Cost of what earlier scans have moved into the payload.
    moved: AtomicU64,
    /// First request of the last scan that saw any, and the cost of that scan. The request is 0 when there was none.
    last_first: AtomicUsize,
    last_cost: AtomicU64,
    /// As above, of the scan that is under way.
    first: AtomicUsize,
    cost: AtomicU64,
}

impl Pending {
    pub(super) const fn new() -> Self {
        Self {
            payload: AtomicUsize::new(0),
            moved: AtomicU64::new(0),
            last_first: AtomicUsize::new(0),
            last_cost: AtomicU64::new(0),
            first: AtomicUsize::new(0),
            cost: AtomicU64::new(0),
        }
    }

    /// A scan begins, of the payload whose `userp` is at this address.
    pub(super) fn begin(&self, payload: usize) {
        if self.payload.swap(payload, Relaxed) != payload {
            self.moved.store(0, Relaxed);
            self.last_first.store(0, Relaxed);
        } else if self.first.load(Relaxed) != 0 {
            self.last_first.store(self.first.load(Relaxed), Relaxed);
            self.last_cost.store(self.cost.load(Relaxed), Relaxed);
        }
        self.first.store(0, Relaxed);
        self.cost.store(0, Relaxed);
    }

    /// Whether the request at this address is included: the first of a scan is, others while the payload's whole cost
    /// stays within `limit`.
    pub(super) fn include(&self, request: usize, cost: u64, limit: u64) -> bool {
        let begun = self.first.load(Relaxed) != 0;
        if !begun {
            self.first.store(request, Relaxed);
            let last = self.last_first.swap(0, Relaxed);
            if last != 0 && last != request {
                add(&self.moved, self.last_cost.load(Relaxed));
            }
        }
        let sum = self.moved.load(Relaxed).saturating_add(self.cost.load(Relaxed)).saturating_add(cost);
        let included = !begun || sum <= limit;
        if included {
            add(&self.cost, cost);
        }
        included
    }
}

fn add(sum: &AtomicU64, cost: u64) {
    sum.store(sum.load(Relaxed).saturating_add(cost), Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    const A: usize = 0x1000;
    const B: usize = 0x2000;

    /// One scan over requests (address, cost); how many were included.
    fn scan(pending: &Pending, payload: usize, requests: &[(usize, u64)], limit: u64) -> usize {
        pending.begin(payload);
        requests.iter().take_while(|(request, cost)| pending.include(*request, *cost, limit)).count()
    }

    #[test]
    fn includes_up_to_the_limit_and_closes_there() {
        let pending = Pending::new();
        let queue: Vec<(usize, u64)> = (1..=12).map(|i| (i, 10)).collect();
        assert_eq!(scan(&pending, A, &queue, 30), 3);
        assert_eq!(scan(&pending, B, &queue[3..], 30), 3);
        assert_eq!(scan(&pending, A, &queue[6..], 9), 1);
        assert_eq!(scan(&pending, B, &queue[7..], u64::MAX), 5);
    }

    /// T2 in the notes on the host: the scheduler spins on a refused first request.
    #[test]
    fn the_first_request_is_included_whatever_it_costs() {
        let pending = Pending::new();
        assert_eq!(scan(&pending, A, &[(1, u64::MAX), (2, 1)], 100), 1);
        assert_eq!(scan(&pending, B, &[(2, 101), (3, 0)], 100), 1);
        // Also in a payload that is full.
        assert_eq!(scan(&pending, B, &[(3, 60)], 100), 1);
        assert_eq!(scan(&pending, B, &[(4, 60)], 100), 1);
        assert_eq!(scan(&pending, B, &[(5, 60)], 0), 1);
    }

    /// T1: each scan of a scheduled payload looks like a new batch.
    #[test]
    fn a_payload_that_grows_has_one_budget() {
        let pending = Pending::new();
        assert_eq!(scan(&pending, A, &[(1, 30), (2, 30)], 100), 2);
        assert_eq!(scan(&pending, A, &[(3, 30), (4, 30), (5, 30)], 100), 1, "30 of 100 are left");
        assert_eq!(scan(&pending, A, &[(4, 30), (5, 30)], 100), 1, "the first only");
        assert_eq!(scan(&pending, B, &[(5, 30), (6, 30), (7, 30), (8, 30)], 100), 3);
    }

    /// With a queue delay the scheduler looks at the same requests at every wake-up.
    #[test]
    fn requests_that_were_left_waiting_count_once() {
        let pending = Pending::new();
        assert_eq!(scan(&pending, A, &[(1, 30)], 100), 1);
        assert_eq!(scan(&pending, A, &[(1, 30), (2, 30)], 100), 2);
        assert_eq!(scan(&pending, A, &[], 100), 0, "a wake-up for nothing");
        assert_eq!(scan(&pending, A, &[(1, 30), (2, 30), (3, 30), (4, 30)], 100), 3);
        // They have moved; what follows meets a payload of 90.
        assert_eq!(scan(&pending, A, &[(4, 5), (5, 5), (6, 5)], 100), 2);
    }

    #[test]
    fn a_payload_at_an_address_that_came_back_is_new() {
        let pending = Pending::new();
        assert_eq!(scan(&pending, A, &[(1, 90)], 100), 1);
        assert_eq!(scan(&pending, B, &[(2, 90)], 100), 1);
        assert_eq!(scan(&pending, A, &[(3, 50), (4, 50)], 100), 2);
    }
}
