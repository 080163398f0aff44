//! What an instance remembers of its sessions: the newest turns of each, as tokens.
//!
//! The server keeps a session on one instance from START to END, one request at a time, so nothing here is shared. It
//! tells nobody of a session that it ended for being idle, or whose client went away: those go by a clock of our own, and
//! the number of sessions has a bound whatever the clients do.

use std::collections::{HashMap, VecDeque};

use triton_abi::{Error, Result, SequenceFlags, SequenceId};

use crate::config::sequence::{Sequences, Strategy};
use crate::tokenize::{Tokens, TurnLayout};

/// The sessions of one instance. Times are nanoseconds of any steady clock.
pub struct Sessions {
    open: HashMap<Key, Session>,
    strategy: Strategy,
    layout: TurnLayout,
    /// Tokens of all turns of a session, the separators between them counted.
    room: usize,
    most: usize,
    lifetime: u64,
    /// Nothing is too old before this time.
    next_sweep: u64,
}

/// How a session is found. With the direct strategy its slot is the surer name: a client may start a new session under
/// an id while the last requests of the old one still wait, and the server gives it another slot.
#[derive(Clone, PartialEq, Eq, Hash)]
enum Key {
    Slot(usize),
    Id(SequenceId),
}

struct Session {
    id: SequenceId,
    /// The tokens of the turns that are kept, oldest first, without special ones.
    turns: VecDeque<Box<[u32]>>,
    /// Their number, each turn's separator counted.
    tokens: usize,
    touched: u64,
}

/// A request's place in its session. The session is taken out while the request is being read, and [`Sessions::keep`]
/// puts it back.
pub struct Turn {
    /// `None` for a request without an id, which stands for itself.
    session: Option<(Key, Session)>,
    last: bool,
}

impl Sessions {
    /// No session yet. `max_length`: of a whole context, special tokens included; more than the layout's.
    pub fn new(sequences: &Sequences, layout: TurnLayout, max_length: usize) -> Self {
        Self {
            open: HashMap::new(),
            strategy: sequences.strategy,
            room: max_length - layout.special_tokens(),
            layout,
            most: most(sequences),
            lifetime: lifetime(sequences),
            next_sweep: 0,
        }
    }

    /// How many sessions are kept.
    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// The turn that a request brings. `slot`: its place in the batch.
    ///
    /// # Errors
    /// `Unavailable` where the session's earlier turns are no longer there.
    pub fn take(&mut self, slot: usize, id: Option<SequenceId>, flags: SequenceFlags, now: u64) -> Result<Turn> {
        let Some(id) = id else { return Ok(Turn { session: None, last: true }) };
        let key = match self.strategy {
            Strategy::Direct => Key::Slot(slot),
            Strategy::Oldest => Key::Id(id.clone()),
        };
        let kept = self.open.remove(&key).filter(|session| session.id == id);
        let mut session = match kept {
            _ if flags.start => Session { id, turns: VecDeque::new(), tokens: 0, touched: now },
            Some(session) => session,
            None => {
                return Err(Error::unavailable(format!(
                    "the earlier turns of this session are no longer there: an instance keeps {} sessions, each for {} s \
                     after its last turn; start it again with sequence_start",
                    self.most,
                    self.lifetime as f64 / 1e9
                )));
            }
        };
        session.touched = now;
        Ok(Turn { session: Some((key, session)), last: flags.end })
    }

    /// Adds the turn's tokens (of its text alone) to its session; gives the tokens of the whole context. Turns that do
    /// not fit beside the newer ones are forgotten.
    pub fn add(&self, turn: &mut Turn, tokens: &Tokens) -> Option<Tokens> {
        let (_, session) = turn.session.as_mut()?;
        let separator = self.layout.separator_tokens();
        session.turns.push_back(self.layout.turn(tokens).into());
        session.tokens += self.layout.turn(tokens).len() + separator;
        while session.tokens > self.room + separator {
            let Some(oldest) = session.turns.pop_front() else { break };
            session.tokens -= oldest.len() + separator;
        }
        Some(self.layout.fill(session.turns.iter().map(|turn| &turn[..]), tokens.truncated))
    }

    /// Puts a session back, unless this was its last turn. Beyond the bound the session that was not heard of for longest
    /// is forgotten.
    pub fn keep(&mut self, turn: Turn) {
        let Some((key, session)) = turn.session else { return };
        if turn.last {
            return;
        }
        self.next_sweep = self.next_sweep.min(session.touched.saturating_add(self.lifetime));
        self.open.insert(key, session);
        if self.open.len() > self.most {
            let idle = self.open.iter().min_by_key(|(_, session)| session.touched).map(|(key, _)| key.clone());
            idle.and_then(|key| self.open.remove(&key));
        }
    }

    /// Forgets the sessions that were not heard of for longer than the server keeps one, and as long again. After the
    /// turns of a batch are taken: one that waited long in the queue still finds its session.
    pub fn sweep(&mut self, now: u64) {
        if now < self.next_sweep {
            return;
        }
        let lifetime = self.lifetime;
        self.open.retain(|_, session| now.saturating_sub(session.touched) < lifetime);
        let oldest = self.open.values().map(|session| session.touched).min().unwrap_or(now);
        self.next_sweep = oldest.saturating_add(lifetime);
    }
}

/// With the direct strategy a slot has one session. With the other one as many again as may be in progress: what the
/// server ended by itself stays until the clock has come round.
fn most(sequences: &Sequences) -> usize {
    match sequences.strategy {
        Strategy::Direct => sequences.slots,
        Strategy::Oldest => sequences.slots.saturating_mul(2),
    }
}

/// Twice the server's time: by then it has surely ended the session.
fn lifetime(sequences: &Sequences) -> u64 {
    u64::try_from(sequences.idle.as_nanos()).unwrap_or(u64::MAX).saturating_mul(2)
}
