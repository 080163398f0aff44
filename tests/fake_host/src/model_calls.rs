//! The backend, models and instances.

use std::ffi::{c_char, c_void};

use crate::host::{Failure, array, host_calls, put};
use crate::report::InstanceGroup;
use crate::sys::*;

host_calls! { |host|
    fn TRITONBACKEND_ApiVersion(major: *mut u32, minor: *mut u32) {
        let _ = host;
        put(major, 1);
        put(minor, 19);
    }

    fn TRITONBACKEND_BackendName(backend: *mut TRITONBACKEND_Backend, name: *mut *const c_char) {
        put(name, host.backends.get(backend)?.name.as_ptr());
    }

    fn TRITONBACKEND_BackendConfig(
        backend: *mut TRITONBACKEND_Backend, config: *mut *mut TRITONSERVER_Message,
    ) {
        put(config, host.backends.get(backend)?.config);
    }

    fn TRITONBACKEND_BackendState(backend: *mut TRITONBACKEND_Backend, state: *mut *mut c_void) {
        put(state, host.backends.get(backend)?.state);
    }

    fn TRITONBACKEND_BackendSetState(backend: *mut TRITONBACKEND_Backend, state: *mut c_void) {
        host.backends.get(backend)?.state = state;
    }

    fn TRITONBACKEND_BackendAttributeAddPreferredInstanceGroup(
        attributes: *mut TRITONBACKEND_BackendAttribute, kind: TRITONSERVER_InstanceGroupKind,
        count: u64, devices: *const u64, device_count: u64,
    ) {
        let devices = array(devices, device_count);
        host.attributes.get(attributes)?.push(InstanceGroup { kind, count, devices });
    }

    fn TRITONBACKEND_ModelName(model: *mut TRITONBACKEND_Model, name: *mut *const c_char) {
        put(name, host.models.get(model)?.name.as_ptr());
    }

    fn TRITONBACKEND_ModelVersion(model: *mut TRITONBACKEND_Model, version: *mut u64) {
        put(version, host.models.get(model)?.version);
    }

    fn TRITONBACKEND_ModelRepository(
        model: *mut TRITONBACKEND_Model, kind: *mut TRITONBACKEND_ArtifactType,
        location: *mut *const c_char,
    ) {
        put(kind, TRITONBACKEND_ARTIFACT_FILESYSTEM);
        put(location, host.models.get(model)?.directory.as_ptr());
    }

    fn TRITONBACKEND_ModelConfig(
        model: *mut TRITONBACKEND_Model, version: u32, config: *mut *mut TRITONSERVER_Message,
    ) {
        if version != 1 {
            return Err(Failure::misuse("there is no such version of the configuration"));
        }
        let json = host.models.get(model)?.config.clone().into_bytes();
        put(config, host.insert(|host| &mut host.messages, json));
    }

    fn TRITONBACKEND_ModelAutoCompleteConfig(model: *mut TRITONBACKEND_Model, wanted: *mut bool) {
        put(wanted, host.models.get(model)?.auto_complete);
    }

    fn TRITONBACKEND_ModelSetConfig(
        model: *mut TRITONBACKEND_Model, version: u32, config: *mut TRITONSERVER_Message,
    ) {
        if version != 1 {
            return Err(Failure::misuse("there is no such version of the configuration"));
        }
        let json = host.messages.get(config)?.clone();
        host.models.get(model)?.config = String::from_utf8_lossy(&json).into_owned();
    }

    fn TRITONBACKEND_ModelBackend(
        model: *mut TRITONBACKEND_Model, backend: *mut *mut TRITONBACKEND_Backend,
    ) {
        put(backend, host.models.get(model)?.backend);
    }

    fn TRITONBACKEND_ModelState(model: *mut TRITONBACKEND_Model, state: *mut *mut c_void) {
        put(state, host.models.get(model)?.state);
    }

    fn TRITONBACKEND_ModelSetState(model: *mut TRITONBACKEND_Model, state: *mut c_void) {
        host.models.get(model)?.state = state;
    }

    fn TRITONBACKEND_ModelInstanceName(
        instance: *mut TRITONBACKEND_ModelInstance, name: *mut *const c_char,
    ) {
        put(name, host.instances.get(instance)?.name.as_ptr());
    }

    fn TRITONBACKEND_ModelInstanceKind(
        instance: *mut TRITONBACKEND_ModelInstance, kind: *mut TRITONSERVER_InstanceGroupKind,
    ) {
        put(kind, host.instances.get(instance)?.kind);
    }

    fn TRITONBACKEND_ModelInstanceDeviceId(
        instance: *mut TRITONBACKEND_ModelInstance, device: *mut i32,
    ) {
        put(device, host.instances.get(instance)?.device);
    }

    fn TRITONBACKEND_ModelInstanceModel(
        instance: *mut TRITONBACKEND_ModelInstance, model: *mut *mut TRITONBACKEND_Model,
    ) {
        put(model, host.instances.get(instance)?.model);
    }

    fn TRITONBACKEND_ModelInstanceState(
        instance: *mut TRITONBACKEND_ModelInstance, state: *mut *mut c_void,
    ) {
        put(state, host.instances.get(instance)?.state);
    }

    fn TRITONBACKEND_ModelInstanceSetState(
        instance: *mut TRITONBACKEND_ModelInstance, state: *mut c_void,
    ) {
        host.instances.get(instance)?.state = state;
    }

    fn TRITONBACKEND_ModelReportMemoryUsage(
        model: *mut TRITONBACKEND_Model, usage: *mut *mut TRITONSERVER_BufferAttributes, count: u32,
    ) {
        host.models.get(model)?;
        let entries = array(usage, u64::from(count));
        host.memory_usage = entries.into_iter().map(|entry| host.usage.get(entry).copied()).collect::<Result<_, _>>()?;
    }

    fn TRITONBACKEND_ModelInstanceReportMemoryUsage(
        instance: *mut TRITONBACKEND_ModelInstance, usage: *mut *mut TRITONSERVER_BufferAttributes,
        count: u32,
    ) {
        host.instances.get(instance)?;
        for entry in array(usage, u64::from(count)) {
            host.usage.get(entry)?;
        }
    }

    fn TRITONBACKEND_ModelInstanceReportStatistics(
        instance: *mut TRITONBACKEND_ModelInstance, request: *mut TRITONBACKEND_Request,
        success: bool, exec_start: u64, compute_start: u64, compute_end: u64, exec_end: u64,
    ) {
        host.instances.get(instance)?;
        host.requests.get(request)?;
        in_order(&[exec_start, compute_start, compute_end, exec_end])?;
        host.outcomes.entry(request.addr()).or_default().statistics.push(success);
    }

    fn TRITONBACKEND_ModelInstanceReportBatchStatistics(
        instance: *mut TRITONBACKEND_ModelInstance, batch_size: u64,
        exec_start: u64, compute_start: u64, compute_end: u64, exec_end: u64,
    ) {
        host.instances.get(instance)?;
        in_order(&[exec_start, compute_start, compute_end, exec_end])?;
        host.batch_rows.push(batch_size);
    }
}

fn in_order(times: &[u64]) -> Result<(), Failure> {
    if times.is_sorted() && times[0] > 0 {
        return Ok(());
    }
    Err(Failure::misuse(format!("times are not in order: {times:?}")))
}
