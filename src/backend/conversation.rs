//! Conversations: with `sequence_batching` each request brings a turn of its session, and the answer is computed over the
//! newest turns that fit `max_length`.
//!
//! A turn belongs to its session from when its text is tokenized, whatever becomes of its answer. A request whose text is
//! refused, or whose client has gone away by then, adds none; its START and END hold all the same, so that no later turn
//! meets an older session under the same id.

use std::sync::Arc;

use triton_abi::metrics::Gauge;
use triton_abi::{ComputeTimes, Error, ModelHandle, Request, Result, SequenceId, log_info, log_warn, now_ns};

use super::inputs::Inputs;
use super::metrics;
use super::model::Model;
use super::sessions::{Sessions, Turn};
use crate::config::ModelConfig;
use crate::config::sequence::{IdType, Sequences};
use crate::config::triton::TritonConfig;
use crate::tokenize::{Tokenizer, Tokens, TurnLayout};

/// What all instances of a model have in common.
pub struct Rules {
    /// What config.pbtxt says.
    sequences: Sequences,
    /// How turns are put together.
    layout: TurnLayout,
    /// Tokens of a whole context, special ones included.
    max_length: usize,
    /// Sessions that are kept, in all instances together.
    held: Gauge,
}

impl Rules {
    /// The rules of a model with `sequence_batching`, `None` for one without.
    ///
    /// # Errors
    /// Where the section is incomplete or asks for what is not there, or the model takes no texts, one at a time.
    pub fn load(
        handle: &ModelHandle,
        config: &ModelConfig,
        triton: &TritonConfig,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Option<Self>> {
        let Some(tokenizer) = tokenizer else {
            triton.refuse_sequences("a model that takes INPUT_IDS")?;
            return Ok(None);
        };
        let Some(sequences) = Sequences::read(triton, &config.inputs)? else { return Ok(None) };
        let (name, max_length) = (handle.name()?, config.max_length);
        log_info!(
            "model '{name}': a conversation; strategy {:?}, an instance has up to {} sessions in progress, each of up to \
             {max_length} tokens",
            sequences.strategy,
            sequences.slots
        );
        if sequences.id == Some(IdType::Number) {
            log_warn!(
                "model '{name}': sequence_batching declares the control CORRID with an integer type: a tritonserver before \
                 2.54 writes beyond its memory when a client gives a long string as its sequence id. Leave the control \
                 out: ids are read without it"
            );
        }
        let held = metrics::sessions(&name, handle.version()?)?;
        Ok(Some(Self { sequences, layout: tokenizer.turn_layout()?, max_length, held }))
    }
}

/// The conversations of one instance.
pub struct Conversations {
    rules: Arc<Rules>,
    sessions: Sessions,
    /// Our part of `held`.
    shown: usize,
}

impl Conversations {
    /// None yet.
    pub fn new(rules: &Arc<Rules>) -> Self {
        let sessions = Sessions::new(&rules.sequences, rules.layout.clone(), rules.max_length);
        Self { rules: Arc::clone(rules), sessions, shown: 0 }
    }

    /// Copies the input of each request and finds its session. What only fills an empty slot, what the client no longer
    /// wants and what cannot be read is answered here.
    pub fn read<'a>(
        &mut self,
        model: &Model,
        requests: Vec<Request<'a>>,
    ) -> (Vec<Request<'a>>, Vec<Inputs>, Vec<Turn>) {
        let now = now_ns();
        let (mut kept, mut inputs, mut turns) = (Vec::new(), Vec::new(), Vec::new());
        for (slot, request) in requests.into_iter().enumerate() {
            let turn = match self.turn(slot, &request, now) {
                Ok(Some(turn)) => turn,
                Ok(None) => {
                    request.respond().send_final(ComputeTimes::since(now));
                    continue;
                }
                Err(error) => {
                    request.fail(&model.explain(error));
                    continue;
                }
            };
            let read = match request.is_cancelled() {
                true => Err(Error::cancelled("the request was cancelled")),
                false => Inputs::read(model, &request),
            };
            match read {
                Ok(read) => {
                    kept.push(request);
                    inputs.push(read);
                    turns.push(turn);
                }
                Err(error) => {
                    self.sessions.keep(turn);
                    request.fail(&model.explain(error));
                }
            }
        }
        self.sessions.sweep(now);
        (kept, inputs, turns)
    }

    /// The request's turn, or `None` for one that fills an empty slot.
    fn turn(&mut self, slot: usize, request: &Request<'_>, now: u64) -> Result<Option<Turn>> {
        // A warm-up sample brings the controls that its author gave it.
        if let Some(ready) = &self.rules.sequences.ready
            && let Some(control) = request.optional_input(&ready.name)?
            && control.bytes()? != ready.yes
        {
            return Ok(None);
        }
        let id = request.sequence_id()?;
        check(self.rules.sequences.id, id.as_ref())?;
        self.sessions.take(slot, id, request.sequence_flags()?, now).map(Some)
    }

    /// Makes of the tokens of each turn those of its context, and puts the sessions back.
    pub fn extend(&mut self, turns: Vec<Turn>, tokens: &mut [Vec<Result<Tokens>>]) {
        for (mut turn, rows) in turns.into_iter().zip(tokens) {
            // The server lets requests of one row through, and no others.
            if let [Ok(own)] = &mut rows[..]
                && let Some(context) = self.sessions.add(&mut turn, own)
            {
                *own = context;
            }
            self.sessions.keep(turn);
        }
        self.rules.held.add(self.sessions.len() as f64 - self.shown as f64);
        self.shown = self.sessions.len();
    }
}

impl Drop for Conversations {
    fn drop(&mut self) {
        self.rules.held.add(-(self.shown as f64));
    }
}

/// Whether an id is of the type that config.pbtxt declares.
fn check(declared: Option<IdType>, id: Option<&SequenceId>) -> Result<()> {
    let (declared, given) = match (declared, id) {
        (Some(IdType::Number), Some(SequenceId::Text(_))) => ("a number", "a string"),
        (Some(IdType::Text), Some(SequenceId::Number(_))) => ("TYPE_STRING", "a number"),
        _ => return Ok(()),
    };
    Err(Error::invalid_arg(format!(
        "the request's sequence id is {given}; the control CORRID of config.pbtxt declares {declared}"
    )))
}
