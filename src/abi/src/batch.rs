//! The requests of one call of Execute.

use std::ffi::CStr;
use std::ptr::NonNull;

use crate::clock::{ComputeTimes, now_ns};
use crate::error::{Error, check};
use crate::request::{Owner, Request};
use crate::sys;

/// The requests that Triton gave to one instance at once. Each is answered by its own, in any order.
pub struct Batch<'a> {
    requests: Vec<Request<'a>>,
    report: BatchReport<'a>,
}

impl<'a> Batch<'a> {
    /// Takes ownership of the requests.
    ///
    /// # Safety
    /// `requests` points to `count` live requests (or is NULL with a count of 0) that become ours; the instance
    /// lives through `'a`.
    pub(crate) unsafe fn own(
        instance: NonNull<sys::TRITONBACKEND_ModelInstance>,
        uncacheable: Option<&'a CStr>,
        requests: *mut *mut sys::TRITONBACKEND_Request,
        count: u32,
    ) -> Self {
        let exec_start = now_ns();
        let raws: &[*mut sys::TRITONBACKEND_Request] = if requests.is_null() {
            &[]
        } else {
            // SAFETY: by this function's contract.
            unsafe { std::slice::from_raw_parts(requests, count as usize) }
        };
        let requests = raws
            .iter()
            .filter_map(|&raw| NonNull::new(raw))
            .map(|raw| {
                let owner = Owner { instance, uncacheable, exec_start };
                // SAFETY: live and ours by this function's contract; each is wrapped once.
                unsafe { Request::own(raw, owner) }
            })
            .collect();
        Self { requests, report: BatchReport { instance, exec_start, _instance_lives: std::marker::PhantomData } }
    }

    /// How many requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Answers the requests whose client has gone away with CANCELLED, and drops them.
    pub fn drop_cancelled(&mut self) {
        let mut at = 0;
        while let Some(request) = self.requests.get(at) {
            if request.is_cancelled() {
                let cancelled = Error::cancelled("the request was cancelled");
                self.requests.remove(at).fail(&cancelled);
            } else {
                at += 1;
            }
        }
    }

    /// The requests, and what the statistics of the batch are reported to.
    pub fn into_parts(self) -> (Vec<Request<'a>>, BatchReport<'a>) {
        (self.requests, self.report)
    }
}

/// Reports the statistics of a batch; without it the model's execution count stays 0.
pub struct BatchReport<'a> {
    instance: NonNull<sys::TRITONBACKEND_ModelInstance>,
    exec_start: u64,
    _instance_lives: std::marker::PhantomData<&'a ()>,
}

impl BatchReport<'_> {
    /// When Execute was called ([`now_ns`]).
    pub fn exec_start(&self) -> u64 {
        self.exec_start
    }

    /// Reports one execution of `rows` rows (the sum of the requests' batch dimensions). To be called once, after
    /// the last response, and not at all where nothing was computed.
    pub fn send(self, rows: usize, times: ComputeTimes) {
        // SAFETY: the instance lives through the call of Execute that this value is bound to.
        let sent = unsafe {
            check(sys::TRITONBACKEND_ModelInstanceReportBatchStatistics(
                self.instance.as_ptr(),
                rows as u64,
                self.exec_start,
                times.start,
                times.end,
                now_ns(),
            ))
        };
        if let Err(error) = sent {
            crate::log_error!("the statistics of a batch are lost: {error}");
        }
    }
}
