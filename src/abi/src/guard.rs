//! The boundary that no panic crosses.
//!
//! A panic that reaches `extern "C"` aborts the server with every other model in it. Each entry point runs in
//! [`catch`], which keeps the text. The panic hook that [`install_hook`] sets writes the text and the place to
//! Triton's log, where the default hook would write to the server's standard error.

use std::any::Any;
use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Once;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::error::{Error, Result};
use crate::log;

/// Runs `work` and turns a panic into an INTERNAL error that names `what` and keeps the panic's text.
///
/// State that `work` was changing when it panicked is seen again by later calls: keep it valid at every step, or
/// rebuild it.
pub fn catch<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result,
        Err(payload) => {
            let text = panic_text(payload.as_ref()).into_owned();
            // A payload can panic when it is dropped.
            if let Err(second) = catch_unwind(AssertUnwindSafe(move || drop(payload))) {
                std::mem::forget(second);
            }
            Err(Error::internal(format!("panic in {what}: {text}")))
        }
    }
}

/// The text of a panic, without user text.
///
/// The only texts of the standard library that quote data are those of string slicing: their quotation goes.
fn panic_text(payload: &(dyn Any + Send)) -> std::borrow::Cow<'_, str> {
    let text = if let Some(text) = payload.downcast_ref::<&str>() {
        text
    } else if let Some(text) = payload.downcast_ref::<String>() {
        text.as_str()
    } else {
        "(no text)"
    };
    if text.contains("byte index") || text.contains("when slicing") {
        "string slice out of range or off a character boundary".into()
    } else {
        text.into()
    }
}

thread_local! {
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// The text of the panic that is unwinding this thread, for what is dropped on the way.
pub(crate) fn current_panic() -> Option<String> {
    if !std::thread::panicking() {
        return None;
    }
    let text = LAST_PANIC.try_with(|last| last.try_borrow().map(|text| text.clone()));
    Some(text.ok().and_then(|text| text.ok()).unwrap_or_default())
}

static IN_SERVER: AtomicBool = AtomicBool::new(false);

/// From here on panics are logged through Triton.
pub(crate) fn install_hook() {
    static ONCE: Once = Once::new();
    IN_SERVER.store(true, Ordering::Relaxed);
    ONCE.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if !IN_SERVER.load(Ordering::Relaxed) {
                return before(info);
            }
            let (file, line) = info.location().map_or(("unknown", 0), |at| (at.file(), at.line()));
            let text = panic_text(info.payload());
            // Both fail only at the thread's very end, or in a panic within this hook.
            let _ = LAST_PANIC.try_with(|last| {
                if let Ok(mut last) = last.try_borrow_mut() {
                    last.clear();
                    last.push_str(&text);
                }
            });
            log::write(log::Level::Error, file, line, format_args!("panic: {text}"));
        }));
    });
}

/// The server is about to go: its log is not to be used any more.
pub(crate) fn retire_hook() {
    IN_SERVER.store(false, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_the_text_of_a_panic() {
        let error = catch::<()>("load", || panic!("broken {}", 7)).expect_err("panics");
        assert_eq!(error.message(), "panic in load: broken 7");
    }

    #[test]
    fn drops_user_text_that_string_slicing_quotes() {
        let error = catch::<()>("execute", || {
            let secret = "sécret".to_string();
            Err(Error::internal(&secret[..std::hint::black_box(2)]))
        })
        .expect_err("panics");
        assert!(!error.message().contains("cret"), "{error}");
    }

    #[test]
    fn survives_a_payload_that_panics_in_its_drop() {
        struct Bomb;
        impl Drop for Bomb {
            fn drop(&mut self) {
                panic!("again");
            }
        }
        let error = catch::<()>("x", || std::panic::panic_any(Bomb)).expect_err("panics");
        assert_eq!(error.message(), "panic in x: (no text)");
    }
}
