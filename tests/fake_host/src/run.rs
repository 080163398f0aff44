//! Takes a plugin through its life, as the server does.

use std::ffi::CString;
use std::ptr::null_mut;
use std::sync::{Mutex, PoisonError};

use crate::host::{self, BackendObject, Fault, InstanceObject, ModelObject, host};
use crate::plugin::Plugin;
use crate::report::{Answer, Report};
use crate::scenario::Scenario;
use crate::sys::*;

/// The host is one for the process: one run at a time.
static TURN: Mutex<()> = Mutex::new(());

/// Runs a scenario from Initialize to Finalize, with at most one failing call.
///
/// As in the server: what fails to initialize is finalized all the same; each instance is initialized on a thread
/// of its own; requests that Execute refuses are answered and released by the host.
pub fn run(plugin: &Plugin, scenario: &Scenario, fault: Option<Fault>) -> Report {
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    host().reset(fault);
    let mut report = Report::default();
    let requests = live(plugin, scenario, &mut report);

    let mut host = host();
    report.outcomes = requests.iter().map(|request| host.outcomes.get(request).cloned().unwrap_or_default()).collect();
    report.failed_call = fault.and_then(|fault| host.calls.get(fault.call).copied());
    report.leaks = host.alive();
    report.batch_rows = std::mem::take(&mut host.batch_rows);
    report.memory_usage = std::mem::take(&mut host.memory_usage);
    report.calls = std::mem::take(&mut host.calls);
    report.logs = std::mem::take(&mut host.logs);
    report.misuses = std::mem::take(&mut host.misuses);
    report.metrics = std::mem::take(&mut host.metric_values);
    report
}

/// Runs a scenario once as it is, and then once for each call of the host with that call failing with `code`. Every
/// run has to be sound ([`Report::assert_sound`]) and at most one request may be hit. `look` sees each report, the
/// clean one first.
pub fn sweep(plugin: &Plugin, scenario: &Scenario, code: TRITONSERVER_Error_Code, mut look: impl FnMut(&Report)) {
    let clean = run(plugin, scenario, None);
    clean.assert_sound();
    assert!(clean.load_error.is_none(), "the load fails: {:?}", clean.load_error);
    look(&clean);
    // The number of calls before the fault is that of the clean run, so every call gets its turn.
    for call in 0..clean.calls.len() {
        let report = run(plugin, scenario, Some(Fault { call, code }));
        assert_eq!(report.failed_call, Some(clean.calls[call]), "calls come in another order");
        report.assert_sound();
        report.assert_at_most_one_differs(&clean);
        look(&report);
    }
}

/// The calls of one life; gives the handles of the requests.
fn live(plugin: &Plugin, scenario: &Scenario, report: &mut Report) -> Vec<usize> {
    let c_string = |text: &str| CString::new(text).expect("text without NUL");
    let config = scenario.backend_config.clone().into_bytes();
    let config = host().insert(|host| &mut host.messages, config);
    let backend: *mut TRITONBACKEND_Backend = host().insert(
        |host| &mut host.backends,
        BackendObject { name: c_string(&scenario.backend), config, state: null_mut() },
    );
    let mut requests = Vec::new();
    // SAFETY: here and below, live handles in the order that the ABI prescribes.
    if note(report, "Initialize", unsafe { (plugin.initialize)(backend) }) {
        let attributes = host().insert(|host| &mut host.attributes, Vec::new());
        // SAFETY: as above. An error is logged by the server, and changes nothing else.
        take_error(unsafe { (plugin.attributes)(backend, attributes) });
        report.instance_groups = host().attributes.remove(attributes).unwrap_or_default();

        if let Some(mut model) = Model::load(plugin, scenario, report, backend) {
            requests.extend(model.serve(plugin, scenario));
            if scenario.reload
                && let Some(next) = Model::load(plugin, scenario, report, backend)
            {
                std::mem::replace(&mut model, next).unload(plugin, report);
                requests.extend(model.serve(plugin, scenario));
            }
            model.unload(plugin, report);
        }
    }
    // SAFETY: as above.
    note(report, "Finalize", unsafe { (plugin.finalize)(backend) });
    host().backends.remove(backend).ok();
    host().messages.remove(config).ok();
    requests
}

/// A loaded model with its instances.
struct Model {
    model: *mut TRITONBACKEND_Model,
    instances: Vec<*mut TRITONBACKEND_ModelInstance>,
}

impl Model {
    /// Loads it; what is half done is finalized.
    fn load(
        plugin: &Plugin,
        scenario: &Scenario,
        report: &mut Report,
        backend: *mut TRITONBACKEND_Backend,
    ) -> Option<Self> {
        let c_string = |text: &str| CString::new(text).expect("text without NUL");
        let model: *mut TRITONBACKEND_Model = host().insert(
            |host| &mut host.models,
            ModelObject {
                backend,
                name: c_string(&scenario.model),
                version: scenario.version,
                directory: c_string(&scenario.directory.to_string_lossy()),
                config: scenario.config.clone(),
                auto_complete: scenario.auto_complete,
                state: null_mut(),
            },
        );
        let mut loaded = Self { model, instances: Vec::new() };
        // SAFETY: a live model of a live backend.
        let mut ready = note(report, "ModelInitialize", unsafe { (plugin.model_initialize)(model) });
        report.config = host().models.get(model).map(|m| m.config.clone()).unwrap_or_default();
        while ready && loaded.instances.len() < scenario.instances {
            ready = loaded.add_instance(plugin, scenario, report);
        }
        if !ready {
            loaded.unload(plugin, report);
            return None;
        }
        Some(loaded)
    }

    fn add_instance(&mut self, plugin: &Plugin, scenario: &Scenario, report: &mut Report) -> bool {
        let name = format!("{}_{}", scenario.model, self.instances.len());
        let instance: *mut TRITONBACKEND_ModelInstance = host().insert(
            |host| &mut host.instances,
            InstanceObject {
                model: self.model,
                name: CString::new(name).unwrap_or_default(),
                kind: TRITONSERVER_INSTANCEGROUPKIND_CPU,
                device: 0,
                state: null_mut(),
            },
        );
        self.instances.push(instance);
        let handle = instance.addr();
        let error = std::thread::scope(|scope| {
            let thread = scope.spawn(move || {
                let instance = std::ptr::without_provenance_mut(handle);
                // SAFETY: a live instance, on a short-lived thread as in the server.
                unsafe { (plugin.instance_initialize)(instance) }.addr()
            });
            thread.join().expect("no panic leaves the plugin")
        });
        note(report, "ModelInstanceInitialize", std::ptr::without_provenance_mut(error))
    }

    /// Executes the batches; gives the handles of the requests.
    fn serve(&self, plugin: &Plugin, scenario: &Scenario) -> Vec<usize> {
        let mut requests = Vec::new();
        for (batch, instance) in scenario.batches.iter().zip(self.instances.iter().cycle()) {
            requests.extend(execute(plugin, *instance, batch));
            // SAFETY: a live instance. Newer servers ask; what it says does not change the run.
            take_error(unsafe { (plugin.instance_ready)(*instance) });
        }
        requests
    }

    fn unload(self, plugin: &Plugin, report: &mut Report) {
        for instance in self.instances {
            // SAFETY: a live instance that executes nothing.
            note(report, "ModelInstanceFinalize", unsafe { (plugin.instance_finalize)(instance) });
            host().instances.remove(instance).ok();
        }
        // SAFETY: a live model without instances.
        note(report, "ModelFinalize", unsafe { (plugin.model_finalize)(self.model) });
        host().models.remove(self.model).ok();
    }
}

fn execute(
    plugin: &Plugin,
    instance: *mut TRITONBACKEND_ModelInstance,
    batch: &[crate::scenario::RequestSpec],
) -> Vec<usize> {
    let handles: Vec<*mut TRITONBACKEND_Request> = batch.iter().map(|spec| host().new_request(spec)).collect();
    let mut passed = handles.clone();
    // SAFETY: a live instance and live requests, which the plugin owns unless it returns an error.
    let error = unsafe { (plugin.execute)(instance, passed.as_mut_ptr(), passed.len() as u32) };
    if let Some((code, message)) = take_error(error) {
        let mut host = host();
        for handle in &handles {
            // Released already: the double free that the real server would commit.
            if let Err(failure) = host.release(*handle) {
                host.misuses.push(format!("after Execute gave an error: {}", failure.message));
            }
            host.outcomes.entry(handle.addr()).or_default().answers.push(Answer {
                error: Some((code, message.clone())),
                outputs: Vec::new(),
                parameters: Default::default(),
            });
        }
    }
    handles.iter().map(|handle| handle.addr()).collect()
}

/// Notes the error of an entry point; true where there is none.
fn note(report: &mut Report, entry: &'static str, error: *mut TRITONSERVER_Error) -> bool {
    match take_error(error) {
        None => true,
        Some((code, message)) => {
            report.load_error.get_or_insert((entry, code, message));
            false
        }
    }
}

/// The error that the plugin returned, deleted.
fn take_error(error: *mut TRITONSERVER_Error) -> Option<(TRITONSERVER_Error_Code, String)> {
    if error.is_null() {
        return None;
    }
    let mut host = host::host();
    match host.errors.remove(error) {
        Ok((code, message)) => Some((code, message.to_string_lossy().into_owned())),
        Err(failure) => {
            host.misuses.push(failure.message);
            None
        }
    }
}
