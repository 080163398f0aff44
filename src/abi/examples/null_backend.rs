//! A backend without an engine: it embeds every text as its length followed by zeros.
//!
//! It uses all of the ABI crate as the real backend does, and misbehaves on demand: the texts `!panic`, `!fail`,
//! `!forget` and `!slow` panic, answer with an error, drop the request unanswered, and wait a while. A decoupled model
//! answers each text with a response of its own.

use std::time::Duration;

use serde_json::{Value, json};
use triton_abi::metrics::{Counter, Gauge, Histogram};
use triton_abi::{
    Backend, BackendHandle, Batch, ComputeTimes, Error, InstanceGroup, InstanceHandle, Kind, ModelHandle, Request,
    Response, Result, Slot, export_backend, log_info, log_verbose, now_ns,
};

const DIMENSIONS: usize = 8;

struct Null {
    instances: u64,
}

struct Model {
    cached: bool,
    decoupled: bool,
    texts: Counter,
    in_flight: Gauge,
    rows: Histogram,
}

struct Instance {
    name: String,
}

export_backend!(Null);

impl Backend for Null {
    type Model = Model;
    type Instance = Instance;

    fn initialize(host: &BackendHandle) -> Result<Self> {
        let config = parse(&host.config_json()?)?;
        let instances = config["cmdline"]["instances"]
            .as_str()
            .map_or(Ok(2), str::parse)
            .map_err(|_| Error::invalid_arg("instances must be a number"))?;
        log_info!("backend {}: {instances} instances for each model", host.name()?);
        Ok(Self { instances })
    }

    fn default_instances(&self) -> Vec<InstanceGroup> {
        vec![InstanceGroup { kind: Kind::Cpu, count: self.instances, devices: Vec::new() }]
    }

    fn load_model(&self, model: &ModelHandle) -> Result<Model> {
        let name = model.name()?;
        let mut config = parse(&model.config_json()?)?;
        if config["parameters"]["panic_at_load"].is_object() {
            panic!("asked to at load");
        }
        if model.is_auto_complete()? && config["input"].as_array().is_none_or(Vec::is_empty) {
            config["max_batch_size"] = json!(256);
            config["input"] = json!([{"name": "TEXT", "data_type": "TYPE_STRING", "dims": [1]}]);
            config["output"] = json!([
                {"name": "EMBEDDING", "data_type": "TYPE_FP32", "dims": [DIMENSIONS]},
                {"name": "BYTE_COUNT", "data_type": "TYPE_INT32", "dims": [1]},
                {"name": "ECHO", "data_type": "TYPE_STRING", "dims": [1]},
            ]);
            config["dynamic_batching"] = json!({});
            model.set_config_json(&config.to_string())?;
        }
        log_verbose!("model {name} lies in {}", model.version_directory()?.display());
        let labels = [("model", name.as_str())];
        Ok(Model {
            cached: config["response_cache"]["enable"] == true,
            decoupled: config["model_transaction_policy"]["decoupled"] == true,
            texts: Counter::new("null_texts", "Texts answered", &labels)?,
            in_flight: Gauge::new("null_in_flight", "Requests in the last batch", &labels)?,
            rows: Histogram::new("null_rows", "Rows of a batch", &labels, &[1.0, 8.0, 64.0])?,
        })
    }

    fn load_instance(&self, _: &Model, instance: &InstanceHandle) -> Result<Instance> {
        match instance.kind()? {
            Kind::Cpu | Kind::Model => {}
            Kind::Gpu => {
                return Err(Error::unsupported(format!("no GPU {} here", instance.device()?)));
            }
        }
        Ok(Instance { name: instance.name()? })
    }

    fn uncacheable_output<'m>(&self, model: &'m Model) -> Option<&'m str> {
        model.cached.then_some("EMBEDDING")
    }

    fn execute(&self, model: &Model, instance: &mut Instance, mut batch: Batch<'_>) {
        batch.drop_cancelled();
        let (requests, report) = batch.into_parts();
        model.in_flight.set(requests.len() as f64);
        let start = now_ns();
        let mut rows = 0;
        for request in requests {
            match Job::read(request) {
                Ok(job) => {
                    rows += job.texts.len();
                    job.answer(model, instance, start);
                }
                Err((request, error)) => request.fail(&error),
            }
        }
        if rows > 0 {
            model.rows.observe(rows as f64);
            report.send(rows, ComputeTimes::since(start));
        }
    }
}

/// A request that was read.
struct Job<'a> {
    request: Request<'a>,
    texts: Vec<String>,
    shape: Vec<i64>,
    outputs: Vec<String>,
}

impl<'a> Job<'a> {
    fn read(request: Request<'a>) -> Result<Self, (Request<'a>, Error)> {
        let read = || -> Result<_> {
            let input = request.input("TEXT")?;
            let texts = input.texts()?;
            let texts = (0..texts.len()).map(|row| texts.str(row).map(str::to_string)).collect::<Result<_>>()?;
            let shape = input.shape().to_vec();
            // An optional input that nothing declares: looked for and not found.
            if let Some(input) = request.optional_input("SCALE")? {
                input.integers()?;
            }
            Ok((texts, shape, request.requested_outputs()?))
        };
        match read() {
            Ok((texts, shape, outputs)) => Ok(Self { request, texts, shape, outputs }),
            Err(error) => Err((request, error)),
        }
    }

    fn answer(self, model: &Model, instance: &Instance, start: u64) {
        for text in &self.texts {
            match text.as_str() {
                "!panic" => panic!("asked to by a text"),
                "!fail" => {
                    return self.request.fail(&Error::invalid_arg("asked to by a text"));
                }
                "!forget" => return,
                "!slow" => std::thread::sleep(Duration::from_millis(300)),
                _ => {}
            }
        }
        let mut response = self.request.respond();
        let filled = if model.decoupled {
            fill_parts(&mut response, instance, &self.texts, &self.outputs)
        } else {
            fill(&mut response, instance, &self.texts, &self.shape, &self.outputs)
        };
        match filled {
            Ok(()) => {
                model.texts.add(self.texts.len() as f64);
                response.send_final(ComputeTimes::since(start));
            }
            Err(error) => response.fail(&error),
        }
    }
}

/// Sends the response of each text but the last, which is left to be sent.
fn fill_parts(response: &mut Response<'_>, instance: &Instance, texts: &[String], outputs: &[String]) -> Result<()> {
    for (row, text) in texts.iter().enumerate() {
        if response.request().is_cancelled() {
            return Err(Error::cancelled("the request was cancelled"));
        }
        if row > 0 {
            response.send_part()?;
        }
        fill(response, instance, std::slice::from_ref(text), &[1, 1], outputs)?;
    }
    Ok(())
}

fn fill(
    response: &mut Response<'_>,
    instance: &Instance,
    texts: &[String],
    shape: &[i64],
    outputs: &[String],
) -> Result<()> {
    let wanted = |name: &str| outputs.iter().any(|output| output == name);
    let batched = |last: usize| {
        let mut shape = shape.to_vec();
        if let Some(dim) = shape.last_mut() {
            *dim = last as i64;
        }
        shape
    };
    let mut embedding: Option<Slot> = None;
    if wanted("EMBEDDING") {
        embedding = Some(response.add_f32("EMBEDDING", &batched(DIMENSIONS))?);
    }
    if wanted("BYTE_COUNT") {
        let slot = response.add_i32("BYTE_COUNT", &batched(1))?;
        for (count, text) in response.i32_mut(slot).iter_mut().zip(texts) {
            *count = i32::try_from(text.len()).unwrap_or(i32::MAX);
        }
    }
    if wanted("ECHO") {
        response.add_strings("ECHO", &batched(1), texts)?;
    }
    if let Some(slot) = embedding {
        // Two passes over the same buffer, as when the rows of a request end in different passes.
        for pass in 0..2 {
            let rows = response.f32_mut(slot).chunks_exact_mut(DIMENSIONS);
            for (row, text) in rows.zip(texts).skip(pass).step_by(2) {
                row[0] = text.len() as f32;
            }
        }
    }
    response.set_string("instance", &instance.name)?;
    response.set_int("rows", texts.len() as i64)?;
    response.set_bool("null", true)
}

fn parse(text: &str) -> Result<Value> {
    if text.is_empty() {
        return Ok(Value::Null);
    }
    serde_json::from_str(text).map_err(|e| Error::internal(format!("not JSON: {e}")))
}
