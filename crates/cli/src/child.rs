//! A program run to its end, whatever that is, with nothing of it left behind.
//!
//! The program stays in our process group: the terminal's Ctrl-C and Ctrl-Z reach it as ever, and it
//! may read from the terminal. What it starts is ended with it all the same, because Linux makes us
//! the parent of whatever loses its own (`PR_SET_CHILD_SUBREAPER`), in sessions of their own too.

use std::fs;
use std::io;
use std::process::{Child, Command, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{self, Pid, Signal, WaitOptions};
use signal_hook::consts::{SIGHUP, SIGINT, SIGQUIT, SIGTERM};
use signal_hook::flag;

/// How often the program is looked at.
const TICK: Duration = Duration::from_millis(50);
/// How long a program may take over ending itself: after Ctrl-C, and again after SIGTERM.
const GRACE: Duration = Duration::from_secs(2);

/// How a program ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// By itself.
    Exited(ExitStatus),
    /// By us, because it took too long.
    TimedOut,
    /// By us or by the same signal, because we were asked to end.
    Interrupted,
}

/// Runs `command` and calls `tick` again and again while it runs. When this returns, no process of
/// the program is left.
///
/// # Errors
/// What keeps the program from being started.
pub fn run(command: &mut Command, timeout: Option<Duration>, tick: impl FnMut()) -> io::Result<End> {
    let (asked_to_end, over) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    for signal in [SIGHUP, SIGINT, SIGQUIT, SIGTERM] {
        // When the program is gone, the signals mean again what they always do.
        flag::register_conditional_default(signal, Arc::clone(&over))?;
        flag::register(signal, Arc::clone(&asked_to_end))?;
    }
    process::set_child_subreaper(Some(process::getpid()))?;
    let mut child = command.spawn()?;
    let end = follow(&mut child, timeout, &asked_to_end, tick);
    end_children();
    over.store(true, Ordering::Relaxed);
    end
}

/// Waits for the end of `child`, or for a reason to end it.
fn follow(
    child: &mut Child,
    timeout: Option<Duration>,
    asked_to_end: &AtomicBool,
    mut tick: impl FnMut(),
) -> io::Result<End> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            let asked = asked_to_end.load(Ordering::Relaxed);
            return Ok(if asked { End::Interrupted } else { End::Exited(status) });
        }
        if asked_to_end.load(Ordering::Relaxed) {
            // Ctrl-C has reached the program too: it may want to say something.
            let patience = Instant::now() + GRACE;
            while Instant::now() < patience && child.try_wait()?.is_none() {
                thread::sleep(TICK);
            }
            return Ok(End::Interrupted);
        }
        if timeout.is_some_and(|timeout| start.elapsed() >= timeout) {
            return Ok(End::TimedOut);
        }
        tick();
        thread::sleep(TICK);
    }
}

/// Ends every process that we are the parent of, and what becomes ours when those end.
///
/// The number of a process that is ours means that process until it has been waited for, so no signal
/// reaches a stranger.
fn end_children() {
    let patience = Instant::now() + GRACE;
    let mut told: Vec<Pid> = Vec::new();
    // Fails when there is no child left.
    while let Ok(ended) = process::wait(WaitOptions::NOHANG) {
        if ended.is_some() {
            continue;
        }
        let kill = Instant::now() >= patience;
        for child in children() {
            // One that has ended in the meantime needs no signal.
            if kill {
                let _ = process::kill_process(child, Signal::KILL);
            } else if !told.contains(&child) {
                told.push(child);
                let _ = process::kill_process(child, Signal::TERM);
            }
        }
        thread::sleep(TICK / 10);
    }
}

/// The processes whose parent we are.
fn children() -> Vec<Pid> {
    let ours = process::getpid().as_raw_nonzero().to_string();
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let child = |entry: fs::DirEntry| {
        let pid = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        // `PID (NAME) STATE PARENT …`, and the name may hold anything.
        let parent = stat.rsplit(')').next()?.split_whitespace().nth(1)?;
        (parent == ours).then(|| Pid::from_raw(pid)).flatten()
    };
    entries.filter_map(child).collect()
}
