//! What the allocator counts, under the names of `torch.cuda.memory_stats`.

/// One figure: its value, its peak, and all that was added to it and taken from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// The value now.
    pub current: u64,
    /// The largest value there was.
    pub peak: u64,
    /// The sum of all increases.
    pub allocated: u64,
    /// The sum of all decreases.
    pub freed: u64,
}

impl Stat {
    pub(crate) fn increase(&mut self, amount: u64) {
        self.current += amount;
        self.peak = self.peak.max(self.current);
        // The history has no bound: a tape may allocate more in all than a counter holds.
        self.allocated = self.allocated.wrapping_add(amount);
    }

    pub(crate) fn decrease(&mut self, amount: u64) {
        self.current -= amount;
        self.freed = self.freed.wrapping_add(amount);
    }
}

/// A figure of both pools together and of each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PoolStat {
    /// Both pools.
    pub all: Stat,
    /// Blocks above 1 MiB.
    pub large_pool: Stat,
    /// Blocks up to 1 MiB.
    pub small_pool: Stat,
}

impl PoolStat {
    pub(crate) fn increase(&mut self, small: bool, amount: u64) {
        self.all.increase(amount);
        self.pool(small).increase(amount);
    }

    pub(crate) fn decrease(&mut self, small: bool, amount: u64) {
        self.all.decrease(amount);
        self.pool(small).decrease(amount);
    }

    fn pool(&mut self, small: bool) -> &mut Stat {
        if small { &mut self.small_pool } else { &mut self.large_pool }
    }
}

/// What the allocator of one device counted. Sizes are block sizes, in bytes, except
/// `requested_bytes`; the others are numbers of things.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Blocks handed out.
    pub allocation: PoolStat,
    /// Segments taken with `cudaMalloc`; expandable segments are not counted.
    pub segment: PoolStat,
    /// Blocks handed out or awaiting free.
    pub active: PoolStat,
    /// Free blocks that share a segment with others; expandable segments are not counted.
    pub inactive_split: PoolStat,
    /// Bytes of blocks handed out.
    pub allocated_bytes: PoolStat,
    /// Bytes of segments.
    pub reserved_bytes: PoolStat,
    /// Bytes of blocks handed out or awaiting free.
    pub active_bytes: PoolStat,
    /// Bytes of free blocks that share a segment with others.
    pub inactive_split_bytes: PoolStat,
    /// Bytes asked for, of blocks handed out or awaiting free.
    pub requested_bytes: PoolStat,
    /// Blocks handed out that reach `max_split_size`.
    pub oversize_allocations: Stat,
    /// Segments that reach `max_split_size`.
    pub oversize_segments: Stat,
    /// Requests that had to give back all cached blocks first.
    pub num_alloc_retries: u64,
    /// Requests that failed.
    pub num_ooms: u64,
    /// How often all streams were waited for.
    pub num_sync_all_streams: u64,
    /// Calls that took memory from the device, mapped pages included.
    pub num_device_alloc: u64,
    /// Calls that gave memory back, unmapped pages included.
    pub num_device_free: u64,
}

impl Stats {
    /// Every figure with its name in `torch.cuda.memory_stats`, in that function's order.
    pub fn entries(&self) -> Vec<(String, u64)> {
        let pooled = [
            ("active", &self.active),
            ("active_bytes", &self.active_bytes),
            ("allocated_bytes", &self.allocated_bytes),
            ("allocation", &self.allocation),
            ("inactive_split", &self.inactive_split),
            ("inactive_split_bytes", &self.inactive_split_bytes),
            ("requested_bytes", &self.requested_bytes),
            ("reserved_bytes", &self.reserved_bytes),
            ("segment", &self.segment),
        ];
        let mut entries = vec![
            ("num_alloc_retries".to_owned(), self.num_alloc_retries),
            ("num_device_alloc".to_owned(), self.num_device_alloc),
            ("num_device_free".to_owned(), self.num_device_free),
            ("num_ooms".to_owned(), self.num_ooms),
            ("num_sync_all_streams".to_owned(), self.num_sync_all_streams),
        ];
        let mut add = |name: &str, stat: &Stat| {
            entries.push((format!("{name}.allocated"), stat.allocated));
            entries.push((format!("{name}.current"), stat.current));
            entries.push((format!("{name}.freed"), stat.freed));
            entries.push((format!("{name}.peak"), stat.peak));
        };
        for (name, stat) in pooled {
            add(&format!("{name}.all"), &stat.all);
            add(&format!("{name}.large_pool"), &stat.large_pool);
            add(&format!("{name}.small_pool"), &stat.small_pool);
        }
        add("oversize_allocations", &self.oversize_allocations);
        add("oversize_segments", &self.oversize_segments);
        entries.sort_unstable();
        entries
    }
}
