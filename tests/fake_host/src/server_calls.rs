//! Errors, logs, messages and metrics.

use std::ffi::{CString, c_char, c_int, c_void};

use crate::host::{Failure, MetricObject, array, host, host_calls, put, text};
use crate::sys::*;

#[unsafe(no_mangle)]
extern "C" fn TRITONSERVER_ErrorNew(code: TRITONSERVER_Error_Code, message: *const c_char) -> *mut TRITONSERVER_Error {
    let message = CString::new(text(message)).unwrap_or_default();
    host().insert(|host| &mut host.errors, (code, message))
}

#[unsafe(no_mangle)]
extern "C" fn TRITONSERVER_ErrorDelete(error: *mut TRITONSERVER_Error) {
    let mut host = host();
    if let Err(failure) = host.errors.remove(error) {
        host.misuses.push(failure.message);
    }
}

#[unsafe(no_mangle)]
extern "C" fn TRITONSERVER_ErrorCode(error: *mut TRITONSERVER_Error) -> TRITONSERVER_Error_Code {
    let mut host = host();
    match host.errors.get(error) {
        Ok((code, _)) => *code,
        Err(failure) => {
            host.misuses.push(failure.message);
            TRITONSERVER_ERROR_UNKNOWN
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn TRITONSERVER_ErrorMessage(error: *mut TRITONSERVER_Error) -> *const c_char {
    let mut host = host();
    match host.errors.get(error) {
        Ok((_, message)) => message.as_ptr(),
        Err(failure) => {
            host.misuses.push(failure.message);
            c"".as_ptr()
        }
    }
}

#[unsafe(no_mangle)]
extern "C" fn TRITONSERVER_LogIsEnabled(_: TRITONSERVER_LogLevel) -> bool {
    true
}

#[unsafe(no_mangle)]
extern "C" fn TRITONSERVER_ParameterNew(
    name: *const c_char,
    kind: TRITONSERVER_ParameterType,
    value: *const c_void,
) -> *mut TRITONSERVER_Parameter {
    let mut host = host();
    if host.note("TRITONSERVER_ParameterNew").is_err() || kind != TRITONSERVER_PARAMETER_STRING {
        return std::ptr::null_mut();
    }
    let label = format!("{}={:?}", text(name), text(value.cast()));
    host.insert(|host| &mut host.parameters, label)
}

#[unsafe(no_mangle)]
extern "C" fn TRITONSERVER_ParameterDelete(parameter: *mut TRITONSERVER_Parameter) {
    let mut host = host();
    if let Err(failure) = host.parameters.remove(parameter) {
        host.misuses.push(failure.message);
    }
}

/// As [`addresses`], for the functions that cannot fail.
pub(crate) fn infallible_addresses() -> [usize; 7] {
    [
        TRITONSERVER_ErrorNew as *const () as usize,
        TRITONSERVER_ErrorDelete as *const () as usize,
        TRITONSERVER_ErrorCode as *const () as usize,
        TRITONSERVER_ErrorMessage as *const () as usize,
        TRITONSERVER_LogIsEnabled as *const () as usize,
        TRITONSERVER_ParameterNew as *const () as usize,
        TRITONSERVER_ParameterDelete as *const () as usize,
    ]
}

host_calls! { |host|
    fn TRITONSERVER_LogMessage(
        level: TRITONSERVER_LogLevel, file: *const c_char, line: c_int, message: *const c_char,
    ) {
        host.logs.push((level, format!("{}:{line}: {}", text(file), text(message))));
    }

    fn TRITONSERVER_MessageNewFromSerializedJson(
        message: *mut *mut TRITONSERVER_Message, base: *const c_char, size: usize,
    ) {
        let json = array(base.cast::<u8>(), size as u64);
        put(message, host.insert(|host| &mut host.messages, json));
    }

    fn TRITONSERVER_MessageSerializeToJson(
        message: *mut TRITONSERVER_Message, base: *mut *const c_char, size: *mut usize,
    ) {
        let json = host.messages.get(message)?;
        put(base, json.as_ptr().cast());
        put(size, json.len());
    }

    fn TRITONSERVER_MessageDelete(message: *mut TRITONSERVER_Message) {
        if host.backends.values().any(|backend| backend.config == message) {
            return Err(Failure::misuse("the backend's own message is deleted"));
        }
        host.messages.remove(message)?;
    }

    fn TRITONSERVER_BufferAttributesNew(attributes: *mut *mut TRITONSERVER_BufferAttributes) {
        put(attributes, host.insert(|host| &mut host.usage, (TRITONSERVER_MEMORY_CPU, 0, 0)));
    }

    fn TRITONSERVER_BufferAttributesDelete(attributes: *mut TRITONSERVER_BufferAttributes) {
        host.usage.remove(attributes)?;
    }

    fn TRITONSERVER_BufferAttributesSetMemoryType(
        attributes: *mut TRITONSERVER_BufferAttributes, memory: TRITONSERVER_MemoryType,
    ) {
        host.usage.get(attributes)?.0 = memory;
    }

    fn TRITONSERVER_BufferAttributesSetMemoryTypeId(
        attributes: *mut TRITONSERVER_BufferAttributes, id: i64,
    ) {
        host.usage.get(attributes)?.1 = id;
    }

    fn TRITONSERVER_BufferAttributesSetByteSize(
        attributes: *mut TRITONSERVER_BufferAttributes, bytes: usize,
    ) {
        host.usage.get(attributes)?.2 = bytes;
    }

    fn TRITONSERVER_MetricFamilyNew(
        family: *mut *mut TRITONSERVER_MetricFamily, kind: TRITONSERVER_MetricKind,
        name: *const c_char, _help: *const c_char,
    ) {
        let name = text(name);
        if host.families.values().any(|(_, other)| *other == name) {
            return Err(Failure::misuse(format!("two live objects for metric family {name}")));
        }
        put(family, host.insert(|host| &mut host.families, (kind, name)));
    }

    fn TRITONSERVER_MetricFamilyDelete(family: *mut TRITONSERVER_MetricFamily) {
        if host.metrics.values().any(|metric| metric.family == family.addr()) {
            return Err(Failure::misuse("a metric family is deleted before its metrics"));
        }
        host.families.remove(family)?;
    }

    fn TRITONSERVER_MetricArgsNew(args: *mut *mut TRITONSERVER_MetricArgs) {
        put(args, host.insert(|host| &mut host.metric_args, Vec::new()));
    }

    fn TRITONSERVER_MetricArgsSetHistogram(
        args: *mut TRITONSERVER_MetricArgs, buckets: *const f64, count: u64,
    ) {
        *host.metric_args.get(args)? = array(buckets, count);
    }

    fn TRITONSERVER_MetricArgsDelete(args: *mut TRITONSERVER_MetricArgs) {
        host.metric_args.remove(args)?;
    }

    fn TRITONSERVER_MetricNewWithArgs(
        metric: *mut *mut TRITONSERVER_Metric, family: *mut TRITONSERVER_MetricFamily,
        labels: *mut *const TRITONSERVER_Parameter, label_count: u64,
        args: *const TRITONSERVER_MetricArgs,
    ) {
        let kind = host.families.get(family)?.0;
        if (kind == TRITONSERVER_METRIC_KIND_HISTOGRAM) == args.is_null() {
            return Err(Failure::misuse("only histograms have arguments"));
        }
        if !args.is_null() && !host.metric_args.get(args)?.is_sorted() {
            return Err(Failure::misuse("buckets of a histogram are not in order"));
        }
        let labels = array(labels, label_count)
            .into_iter()
            .map(|label| host.parameters.get(label).cloned())
            .collect::<Result<_, _>>()?;
        let object = MetricObject { family: family.addr(), kind, labels, updates: Vec::new() };
        put(metric, host.insert(|host| &mut host.metrics, object));
    }

    fn TRITONSERVER_MetricDelete(metric: *mut TRITONSERVER_Metric) {
        let metric = host.metrics.remove(metric)?;
        let family = std::ptr::without_provenance::<TRITONSERVER_MetricFamily>(metric.family);
        let name = format!("{}{{{}}}", host.families.get(family)?.1, metric.labels.join(","));
        host.metric_values.entry(name).or_default().extend(metric.updates);
    }

    fn TRITONSERVER_MetricIncrement(metric: *mut TRITONSERVER_Metric, value: f64) {
        let metric = host.metrics.get(metric)?;
        update(metric, value, metric.kind != TRITONSERVER_METRIC_KIND_HISTOGRAM)?;
    }

    fn TRITONSERVER_MetricSet(metric: *mut TRITONSERVER_Metric, value: f64) {
        let metric = host.metrics.get(metric)?;
        update(metric, value, metric.kind == TRITONSERVER_METRIC_KIND_GAUGE)?;
    }

    fn TRITONSERVER_MetricObserve(metric: *mut TRITONSERVER_Metric, value: f64) {
        let metric = host.metrics.get(metric)?;
        update(metric, value, metric.kind == TRITONSERVER_METRIC_KIND_HISTOGRAM)?;
    }
}

fn update(metric: &mut MetricObject, value: f64, right_kind: bool) -> Result<(), Failure> {
    if !right_kind {
        return Err(Failure::misuse("an update that this kind of metric does not have"));
    }
    metric.updates.push(value);
    Ok(())
}
