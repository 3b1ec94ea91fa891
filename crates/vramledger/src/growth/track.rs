//! What there is of one label at the ends of steps, and whether it grows.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

/// How often something that is replaced by something larger must grow in a row to count: of batches
/// of any length two are so by chance often, and three at times.
const LEAST_WITHOUT_COUNT: u32 = 4;
/// The allocator's smallest block.
const BLOCK: u64 = 512;

/// What there is of one label.
#[derive(Clone, Debug, Default)]
pub(super) struct Track {
    /// Now.
    bytes: u64,
    count: u64,
    /// Of what is there, what was made in the last step that made any, and in the steps before that.
    latest: (u32, Born),
    born: BTreeMap<u32, Born>,
    /// At the end of the last step that touched it.
    pub(super) end_bytes: u64,
    pub(super) end_count: u64,
    /// How many earlier steps something of it is there from, and the size of one such object.
    spread: usize,
    size: u64,
    /// Since it last shrank: what there was, how often it grew, how often in number too, how often
    /// without a larger input, and the first and last steps that did.
    base: u64,
    base_count: u64,
    times: u32,
    times_in_number: u32,
    unprompted: u32,
    pub(super) first: u32,
    pub(super) last: u32,
    /// The longest it waited until it grew again.
    wait: u32,
    touched: bool,
}

/// What is there of one step.
#[derive(Clone, Copy, Debug, Default)]
struct Born {
    count: u64,
    bytes: u64,
}

impl Born {
    const fn add(&mut self, bytes: u64) {
        (self.count, self.bytes) = (self.count + 1, self.bytes + bytes);
    }

    const fn take(&mut self, bytes: u64) {
        (self.count, self.bytes) = (self.count.saturating_sub(1), self.bytes.saturating_sub(bytes));
    }
}

impl Track {
    /// Whether this is the first touch in its step.
    pub(super) const fn touch(&mut self) -> bool {
        !std::mem::replace(&mut self.touched, true)
    }

    pub(super) fn made(&mut self, bytes: u64, step: u32) {
        (self.bytes, self.count) = (self.bytes + bytes, self.count + 1);
        if self.latest.0 != step {
            self.settle();
            self.latest.0 = step;
        }
        self.latest.1.add(bytes);
    }

    pub(super) fn gone(&mut self, bytes: u64, step: u32) {
        (self.bytes, self.count) = (self.bytes.saturating_sub(bytes), self.count.saturating_sub(1));
        if self.latest.0 == step && self.latest.1.count > 0 {
            self.latest.1.take(bytes);
        } else if let Entry::Occupied(mut entry) = self.born.entry(step) {
            entry.get_mut().take(bytes);
            if entry.get().count == 0 {
                entry.remove();
            }
        }
    }

    /// What is left of the latest step is of an earlier one now.
    fn settle(&mut self) {
        let born = std::mem::take(&mut self.latest.1);
        if born.count > 0 {
            self.born.insert(self.latest.0, born);
        }
    }

    /// The step `step` is over; `prompted` says that its input was larger than the one before.
    pub(super) fn over(&mut self, step: u32, prompted: bool) {
        self.touched = false;
        let (before, count) = (self.end_bytes, self.end_count);
        (self.end_bytes, self.end_count) = (self.bytes, self.count);
        if self.latest.0 < step {
            self.settle();
        }
        self.spread = self.born.len();
        // What was kept last tells the size better than what was there at first.
        let kept = self.born.last_key_value().map_or(self.latest.1, |(_, born)| *born);
        self.size = kept.bytes / kept.count.max(1);
        // What is there when the first step is over is where growth is counted from.
        if step <= 1 || self.bytes < before {
            (self.base, self.base_count) = (self.bytes, self.count);
            (self.times, self.times_in_number, self.unprompted, self.wait) = (0, 0, 0, 0);
        } else if self.bytes > before {
            if self.times == 0 {
                self.first = step;
            } else {
                self.wait = self.wait.max(step - self.last);
            }
            self.times += 1;
            self.times_in_number += u32::from(self.count > count);
            self.unprompted += u32::from(!prompted);
            self.last = step;
        }
    }

    /// Whether it ever grew since it last shrank.
    pub(super) const fn grew(&self) -> bool {
        self.times > 0
    }

    /// Whether it grew in number, and something of an earlier step is there.
    pub(super) const fn came_to_stay(&self) -> bool {
        self.times_in_number > 0 && self.spread > 0
    }

    /// Whether objects of it came and stayed in several steps.
    pub(super) const fn piled_up(&self) -> bool {
        self.times_in_number > 1 && self.spread > 1
    }

    /// Whether it grows until the last of the steps. It does so in number, and what came in several steps
    /// stays; or it is replaced by ever larger ones, and not because the input is. And it does so as often
    /// since it began as one would expect.
    pub(super) fn grows(&self, last_step: u32) -> bool {
        let in_number = self.piled_up() && self.times_in_number == self.times;
        let in_size = self.times >= LEAST_WITHOUT_COUNT && self.unprompted > 1;
        let wait = if self.wait > 1 { self.wait.max(2 * self.pace()) } else { 1 };
        (in_number || in_size) && last_step.saturating_sub(self.last) <= wait
    }

    /// Steps from one growth to the next.
    fn pace(&self) -> u32 {
        (self.last - self.first).div_ceil(self.times.saturating_sub(1).max(1)).max(1)
    }

    /// The steps over which it grew: the first growth came within a step as the others did.
    fn steps(&self) -> u32 {
        self.last - self.first + self.pace()
    }

    pub(super) fn bytes_per_step(&self) -> u64 {
        (self.end_bytes - self.base) / u64::from(self.steps())
    }

    /// What it grows by each time.
    pub(super) fn bytes_at_once(&self) -> u64 {
        (self.end_bytes - self.base) / u64::from(self.times.max(1))
    }

    pub(super) fn objects_per_step(&self) -> f64 {
        self.end_count.saturating_sub(self.base_count) as f64 / f64::from(self.steps())
    }

    /// The size of one object.
    pub(super) const fn object_bytes(&self) -> u64 {
        self.size
    }

    /// Whether each object fits into a smallest block, as a scalar does.
    pub(super) const fn is_small(&self) -> bool {
        self.end_bytes <= BLOCK * self.end_count
    }
}
