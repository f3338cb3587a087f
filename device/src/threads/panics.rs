//! Turns panics of rank and lane threads into errors that name the place of the panic.

use std::cell::RefCell;
use std::panic::PanicHookInfo;
use std::sync::Once;

thread_local! {
    static WATCHED: RefCell<Option<Option<String>>> = const { RefCell::new(None) };
}

/// Records later panics of this thread instead of printing them. The thread that joins it reports
/// them.
pub fn watch_this_thread() {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let noted = WATCHED.try_with(|w| note(&mut w.borrow_mut(), info)).unwrap_or(false);
            if !noted {
                print(info);
            }
        }));
    });
    WATCHED.with(|w| *w.borrow_mut() = Some(None));
}

fn note(watched: &mut Option<Option<String>>, info: &PanicHookInfo<'_>) -> bool {
    let Some(slot) = watched else { return false };
    let place = info.location().map_or_else(|| "?".into(), ToString::to_string);
    let text = info.payload_as_str().unwrap_or("no message");
    *slot = Some(format!("it panicked at {place}: {text}"));
    true
}

/// The message of this thread's panic, if the thread is watched and has panicked.
pub fn last() -> Option<String> {
    WATCHED.try_with(|w| w.borrow().clone().flatten()).ok().flatten()
}

/// Runs `f`. A panic inside is neither printed nor kept.
pub fn quietly<T>(f: impl FnOnce() -> T) -> T {
    let before = WATCHED.with(|w| w.borrow_mut().take());
    watch_this_thread();
    let done = f();
    WATCHED.with(|w| *w.borrow_mut() = before);
    done
}
