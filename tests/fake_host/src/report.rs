//! What happened.

use std::collections::BTreeMap;

use crate::sys;

/// What became of a scenario.
#[derive(Debug, Default)]
pub struct Report {
    /// The function of the plugin that failed, with its error; later ones were not called.
    pub load_error: Option<(&'static str, sys::TRITONSERVER_Error_Code, String)>,
    /// The preferred instances.
    pub instance_groups: Vec<InstanceGroup>,
    /// The model's configuration after its load.
    pub config: String,
    /// What became of each request, in the order of the scenario; less where the load failed.
    pub outcomes: Vec<Outcome>,
    /// The rows of each reported batch.
    pub batch_rows: Vec<u64>,
    /// What the model said last that it occupies: type of memory, its number, bytes.
    pub memory_usage: Vec<(sys::TRITONSERVER_MemoryType, i64, usize)>,
    /// Every counted call of the host.
    pub calls: Vec<&'static str>,
    /// The call that was failed.
    pub failed_call: Option<&'static str>,
    /// The log.
    pub logs: Vec<(sys::TRITONSERVER_LogLevel, String)>,
    /// All updates of each metric that was deleted, by `family{labels}`.
    pub metrics: BTreeMap<String, Vec<f64>>,
    /// Handles used when they were not alive, and other breaches of the ABI.
    pub misuses: Vec<String>,
    /// What is still alive at the end, by kind.
    pub leaks: Vec<(&'static str, usize)>,
}

/// What became of a request.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// The responses that arrived before the final one, of a decoupled model.
    pub parts: Vec<Answer>,
    /// The final responses that arrived.
    pub answers: Vec<Answer>,
    /// How often it was released.
    pub releases: usize,
    /// The success flag of each report of its statistics.
    pub statistics: Vec<bool>,
}

/// A response as a client sees it.
#[derive(Clone, Debug)]
pub struct Answer {
    /// The error of an error response.
    pub error: Option<(sys::TRITONSERVER_Error_Code, String)>,
    /// The outputs.
    pub outputs: Vec<OutputTensor>,
    /// The parameters, as text.
    pub parameters: BTreeMap<String, String>,
}

/// An output of a response.
#[derive(Clone, Debug)]
pub struct OutputTensor {
    /// Its name.
    pub name: String,
    /// Its type.
    pub datatype: sys::TRITONSERVER_DataType,
    /// Its shape.
    pub shape: Vec<i64>,
    /// Its data; `None` where no buffer was asked for.
    pub bytes: Option<Vec<u8>>,
}

/// A group of equal instances that the plugin prefers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InstanceGroup {
    /// What they run on.
    pub kind: sys::TRITONSERVER_InstanceGroupKind,
    /// How many.
    pub count: u64,
    /// On which devices.
    pub devices: Vec<u64>,
}

impl Report {
    /// Panics unless every request was answered once and released once, nothing leaked, no handle was misused, and
    /// no statistics are wrong.
    pub fn assert_sound(&self) {
        let fault = self.failed_call.map_or(String::new(), |call| format!(" after {call} failed"));
        assert!(self.misuses.is_empty(), "misuse{fault}: {:?}\n{self:#?}", self.misuses);
        assert!(self.leaks.is_empty(), "leaks{fault}: {:?}\n{self:#?}", self.leaks);
        for (number, outcome) in self.outcomes.iter().enumerate() {
            let reports = outcome.statistics.len();
            let one_report = reports == 1
                || self.failed_call == Some("TRITONBACKEND_ModelInstanceReportStatistics")
                || outcome.statistics.is_empty() && self.failed_in_execute();
            assert!(
                outcome.answers.len() == 1 && outcome.releases == 1 && one_report,
                "request {number}{fault}: {outcome:#?}\n{:#?}",
                self.logs
            );
        }
    }

    /// Panics unless what did not have to do with the fault is as in a run without one: requests before and after
    /// the one that it hit are answered as they were.
    pub fn assert_at_most_one_differs(&self, clean: &Report) {
        let differing: Vec<usize> = self
            .outcomes
            .iter()
            .zip(&clean.outcomes)
            .enumerate()
            .filter(|(_, (ours, theirs))| {
                let failed = |outcome: &Outcome| outcome.answers.iter().any(|a| a.error.is_some());
                failed(ours) && !failed(theirs)
            })
            .map(|(number, _)| number)
            .collect();
        assert!(
            differing.len() <= 1 || self.failed_in_execute(),
            "requests {differing:?} fail after {:?} failed\n{:#?}",
            self.failed_call,
            self.logs
        );
    }

    /// Whether Execute itself returned an error, so that the server kept and answered the whole batch.
    fn failed_in_execute(&self) -> bool {
        self.failed_call == Some("TRITONBACKEND_ModelInstanceState")
    }

    /// The final answer of request `number`.
    ///
    /// # Panics
    /// When it has none.
    pub fn answer(&self, number: usize) -> &Answer {
        &self.outcomes[number].answers[0]
    }

    /// The text of every log entry of ERROR.
    pub fn errors_logged(&self) -> Vec<&str> {
        self.logs
            .iter()
            .filter(|(level, _)| *level == sys::TRITONSERVER_LOG_ERROR)
            .map(|(_, text)| text.as_str())
            .collect()
    }
}

impl Answer {
    /// The code of an error response.
    pub fn code(&self) -> Option<sys::TRITONSERVER_Error_Code> {
        self.error.as_ref().map(|(code, _)| *code)
    }

    /// The output with this name.
    pub fn output(&self, name: &str) -> Option<&OutputTensor> {
        self.outputs.iter().find(|output| output.name == name)
    }

    /// The elements of an FP32 output.
    ///
    /// # Panics
    /// When there is none.
    pub fn f32s(&self, name: &str) -> Vec<f32> {
        let (words, _) = self.bytes(name, sys::TRITONSERVER_TYPE_FP32).as_chunks();
        words.iter().map(|word| f32::from_le_bytes(*word)).collect()
    }

    /// The elements of an INT32 output.
    ///
    /// # Panics
    /// When there is none.
    pub fn i32s(&self, name: &str) -> Vec<i32> {
        let (words, _) = self.bytes(name, sys::TRITONSERVER_TYPE_INT32).as_chunks();
        words.iter().map(|word| i32::from_le_bytes(*word)).collect()
    }

    /// The raw bytes of a BYTES output.
    ///
    /// # Panics
    /// When there is none.
    pub fn strings(&self, name: &str) -> Vec<String> {
        let mut bytes = self.bytes(name, sys::TRITONSERVER_TYPE_BYTES);
        let mut strings = Vec::new();
        while let Some((length, rest)) = bytes.split_first_chunk() {
            let (string, rest) = rest.split_at(u32::from_le_bytes(*length) as usize);
            strings.push(String::from_utf8_lossy(string).into_owned());
            bytes = rest;
        }
        strings
    }

    fn bytes(&self, name: &str, datatype: sys::TRITONSERVER_DataType) -> &[u8] {
        let output = self.output(name).unwrap_or_else(|| panic!("no {name} in {self:?}"));
        assert_eq!(output.datatype, datatype, "type of {name}");
        output.bytes.as_deref().unwrap_or_default()
    }
}
