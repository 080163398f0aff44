//! Custom metrics on the server's metrics port.
//!
//! A metric belongs to a family (name, help, kind) and is told apart by its labels. Metrics with the same family
//! and the same labels share one series; it leaves the metrics port with the last of them. That happens at every
//! reload: the new model is loaded before the old one goes.
//!
//! Families are kept once for the process, in this module. The server counts the users of a series for each family
//! object; with a family object for each model, the old model of a reload would free the series that the new one
//! still writes to.

use std::ffi::CString;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Code, Error, Result, c_string, check};
use crate::host;
use crate::sys;

/// A number that only grows.
pub struct Counter(Metric);

/// A number that goes up and down.
pub struct Gauge(Metric);

/// A distribution in buckets.
pub struct Histogram(Metric);

impl Counter {
    /// A counter of the family `name` with these labels.
    pub fn new(name: &str, help: &str, labels: &[(&str, &str)]) -> Result<Self> {
        Metric::new(sys::TRITONSERVER_METRIC_KIND_COUNTER, name, help, labels, None).map(Self)
    }

    /// Adds to it; what is negative or not a number is ignored.
    pub fn add(&self, value: f64) {
        if value >= 0.0 {
            // SAFETY: a live metric.
            let call = |raw| unsafe { sys::TRITONSERVER_MetricIncrement(raw, value) };
            self.0.update(call);
        }
    }
}

impl Gauge {
    /// A gauge of the family `name` with these labels.
    pub fn new(name: &str, help: &str, labels: &[(&str, &str)]) -> Result<Self> {
        Metric::new(sys::TRITONSERVER_METRIC_KIND_GAUGE, name, help, labels, None).map(Self)
    }

    /// Adds to it, or takes away from it what is negative.
    pub fn add(&self, value: f64) {
        // SAFETY: a live metric.
        self.0.update(|raw| unsafe { sys::TRITONSERVER_MetricIncrement(raw, value) });
    }

    /// Sets it.
    pub fn set(&self, value: f64) {
        // SAFETY: a live metric.
        self.0.update(|raw| unsafe { sys::TRITONSERVER_MetricSet(raw, value) });
    }
}

impl Histogram {
    /// A histogram of the family `name` with these labels; `buckets` are upper bounds in ascending order, to which
    /// the server adds infinity.
    pub fn new(name: &str, help: &str, labels: &[(&str, &str)], buckets: &[f64]) -> Result<Self> {
        let kind = sys::TRITONSERVER_METRIC_KIND_HISTOGRAM;
        Metric::new(kind, name, help, labels, Some(buckets)).map(Self)
    }

    /// Adds an observation.
    pub fn observe(&self, value: f64) {
        // SAFETY: a live metric.
        self.0.update(|raw| unsafe { sys::TRITONSERVER_MetricObserve(raw, value) });
    }
}

/// A metric of any kind. A server that was built without metrics gives none; then updates do nothing.
struct Metric(Option<Registered>);

struct Registered {
    raw: NonNull<sys::TRITONSERVER_Metric>,
    family: NonNull<sys::TRITONSERVER_MetricFamily>,
}

// SAFETY: the server allows updates of a metric from any thread at once; it is made and deleted under FAMILIES.
unsafe impl Send for Metric {}
// SAFETY: as above.
unsafe impl Sync for Metric {}

/// A family that has metrics.
struct Family {
    name: String,
    kind: sys::TRITONSERVER_MetricKind,
    raw: NonNull<sys::TRITONSERVER_MetricFamily>,
    users: usize,
}

// SAFETY: only used under FAMILIES' lock.
unsafe impl Send for Family {}

/// The families in use. Its lock also covers the making and deleting of metrics, which the server does not make
/// atomic.
static FAMILIES: Mutex<Vec<Family>> = Mutex::new(Vec::new());

fn families() -> MutexGuard<'static, Vec<Family>> {
    FAMILIES.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Metric {
    fn new(
        kind: sys::TRITONSERVER_MetricKind,
        name: &str,
        help: &str,
        labels: &[(&str, &str)],
        buckets: Option<&[f64]>,
    ) -> Result<Self> {
        let labels = labels.iter().map(|(key, value)| Label::new(key, value)).collect::<Result<Vec<_>>>()?;
        let mut families = families();
        let family = match join_family(&mut families, kind, name, help) {
            Ok(family) => family,
            Err(error) if error.code() == Code::Unsupported => return Ok(Self(None)),
            Err(error) => return Err(error.context(format!("metric {name}"))),
        };
        match new_in_family(family, &labels, buckets) {
            Ok(raw) => Ok(Self(Some(Registered { raw, family }))),
            Err(error) => {
                leave_family(&mut families, family);
                Err(error.context(format!("metric {name}")))
            }
        }
    }

    fn update(&self, call: impl FnOnce(*mut sys::TRITONSERVER_Metric) -> *mut sys::TRITONSERVER_Error) {
        let Some(metric) = &self.0 else { return };
        // SAFETY: the callers' calls return NULL or an error that is ours.
        if let Err(error) = unsafe { check(call(metric.raw.as_ptr())) } {
            crate::log_verbose!("a metric is not updated: {error}");
        }
    }
}

impl Drop for Metric {
    fn drop(&mut self) {
        let Some(metric) = self.0.take() else { return };
        let mut families = families();
        // SAFETY: live and ours, deleted once, before its family. On error it is still ours.
        unsafe {
            host::give_back("metric", || sys::TRITONSERVER_MetricDelete(metric.raw.as_ptr()));
        }
        leave_family(&mut families, metric.family);
    }
}

fn join_family(
    families: &mut Vec<Family>,
    kind: sys::TRITONSERVER_MetricKind,
    name: &str,
    help: &str,
) -> Result<NonNull<sys::TRITONSERVER_MetricFamily>> {
    if let Some(family) = families.iter_mut().find(|family| family.name == name) {
        if family.kind != kind {
            return Err(Error::internal("the family exists with another kind"));
        }
        family.users += 1;
        return Ok(family.raw);
    }
    let (c_name, c_help) = (c_string(name), c_string(help));
    // SAFETY: NUL-terminated strings, which are copied; the family is ours.
    let raw = unsafe {
        host::get_handle("metric family", |out| {
            sys::TRITONSERVER_MetricFamilyNew(out, kind, c_name.as_ptr(), c_help.as_ptr())
        })
    }?;
    families.push(Family { name: name.to_string(), kind, raw, users: 1 });
    Ok(raw)
}

fn leave_family(families: &mut Vec<Family>, raw: NonNull<sys::TRITONSERVER_MetricFamily>) {
    let Some(at) = families.iter().position(|family| family.raw == raw) else {
        return;
    };
    families[at].users -= 1;
    if families[at].users == 0 {
        families.remove(at);
        // SAFETY: ours, without metrics, deleted once. On error it is still ours.
        unsafe {
            host::give_back("metric family", || sys::TRITONSERVER_MetricFamilyDelete(raw.as_ptr()));
        }
    }
}

fn new_in_family(
    family: NonNull<sys::TRITONSERVER_MetricFamily>,
    labels: &[Label],
    buckets: Option<&[f64]>,
) -> Result<NonNull<sys::TRITONSERVER_Metric>> {
    let args = buckets.map(HistogramArgs::new).transpose()?;
    let args = args.as_ref().map_or(std::ptr::null(), |args| args.0.as_ptr().cast_const());
    let mut labels: Vec<*const sys::TRITONSERVER_Parameter> =
        labels.iter().map(|label| label.0.as_ptr().cast_const()).collect();
    // SAFETY: a live family, labels and arguments, which stay ours; the metric is ours.
    unsafe {
        host::get_handle("metric", |out| {
            sys::TRITONSERVER_MetricNewWithArgs(out, family.as_ptr(), labels.as_mut_ptr(), labels.len() as u64, args)
        })
    }
}

struct Label(NonNull<sys::TRITONSERVER_Parameter>);

impl Label {
    fn new(key: &str, value: &str) -> Result<Self> {
        let (key, value): (CString, CString) = (c_string(key), c_string(value));
        // SAFETY: NUL-terminated strings, which are copied.
        let raw = unsafe {
            sys::TRITONSERVER_ParameterNew(key.as_ptr(), sys::TRITONSERVER_PARAMETER_STRING, value.as_ptr().cast())
        };
        NonNull::new(raw).map(Self).ok_or_else(|| Error::internal("the server makes no metric label"))
    }
}

impl Drop for Label {
    fn drop(&mut self) {
        // SAFETY: live and ours, deleted once.
        unsafe { sys::TRITONSERVER_ParameterDelete(self.0.as_ptr()) };
    }
}

struct HistogramArgs(NonNull<sys::TRITONSERVER_MetricArgs>);

impl HistogramArgs {
    fn new(buckets: &[f64]) -> Result<Self> {
        // SAFETY: the arguments object is ours.
        let args =
            unsafe { host::get_handle("metric arguments", |out| sys::TRITONSERVER_MetricArgsNew(out)) }.map(Self)?;
        // SAFETY: live arguments; the numbers are copied.
        unsafe {
            check(sys::TRITONSERVER_MetricArgsSetHistogram(args.0.as_ptr(), buckets.as_ptr(), buckets.len() as u64))
        }?;
        Ok(args)
    }
}

impl Drop for HistogramArgs {
    fn drop(&mut self) {
        // SAFETY: live and ours, deleted once. On error it is still ours.
        unsafe {
            host::give_back("metric arguments object", || sys::TRITONSERVER_MetricArgsDelete(self.0.as_ptr()));
        }
    }
}
