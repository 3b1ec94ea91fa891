//! Runs of PyTorch's own allocator on random requests, replayed: every address, segment, failure
//! and statistic.
//!
//! `tests/truth/allocator` holds what `libc10_cuda.so` of torch 2.15.0 did on a device whose
//! addresses are handed out first fit, upwards, in pages of 2 MiB. A line is a settings string, the
//! device (total and what lies outside the allocator), an action with its operands, or a statistic
//! at the end (current, peak, allocated, freed).

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails, helpers included")]

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::PathBuf;

use allocator::{Action, CachingAllocator, DeviceMemory, Settings, Stat, TieRule};
use flate2::read::GzDecoder;
use ledger::{Bytes, DeviceId, Event, Meter, ObjectId, Pool, Stream};

const GPU: DeviceId = DeviceId(0);

/// The recorded segment actions that no action of the program has explained yet.
#[derive(Default)]
struct Expected(Vec<Action>);

impl Expected {
    fn are(&mut self, found: &[Action], place: &str) {
        assert_eq!(found, self.0, "{place}");
        self.0.clear();
    }
}

fn check(name: &str, text: &str) {
    let mut lines = text.lines().enumerate();
    let conf = lines.next().unwrap().1.strip_prefix("conf ").unwrap();
    let device: Vec<u64> = operands(lines.next().unwrap().1.strip_prefix("device ").unwrap());
    let (settings, warnings) = Settings::parse(conf).unwrap();
    assert_eq!(warnings, [], "{name}");
    let memory = DeviceMemory { total: Some(Bytes::new(device[0])), outside: Bytes::new(device[1]) };
    let mut allocator = CachingAllocator::new(&settings, TieRule::SegmentCounter, &[Some(memory)]);

    let mut expected = Expected::default();
    let mut index = 0;
    // What `empty_cache` does is recorded after it.
    let mut emptied = false;
    for (number, line) in lines {
        let place = format!("{name} ({conf}), line {}: {line}", number + 1);
        let (action, rest) = line.split_once(' ').unwrap_or((line, ""));
        if action == "stat" {
            let (figure, values) = rest.split_once(' ').unwrap();
            let stat = statistic(&allocator, figure);
            let found = [stat.current, stat.peak, stat.allocated, stat.freed];
            assert_eq!(found, operands(values)[..], "{place}");
            continue;
        }
        let values = operands(rest);
        let bytes = || Bytes::new(values[0]);
        let segment_action = match action {
            "segment_alloc" => Some(Action::SegmentAlloc(bytes())),
            "segment_free" => Some(Action::SegmentFree(bytes())),
            "segment_map" => Some(Action::SegmentMap(bytes())),
            "segment_unmap" => Some(Action::SegmentUnmap(bytes())),
            _ => None,
        };
        if let Some(segment_action) = segment_action {
            expected.0.push(segment_action);
            continue;
        }
        if std::mem::take(&mut emptied) {
            let released: Vec<Action> = allocator.actions().to_vec();
            let (mine, later) = expected.0.split_at(released.len().min(expected.0.len()));
            assert_eq!(mine, released, "{place}");
            expected = Expected(later.to_vec());
        }
        let object = ObjectId(values.first().map_or(0, |object| *object as u32));
        let alloc = |values: &[u64]| Event::Alloc {
            object,
            bytes: Bytes::new(values[1]),
            device: GPU,
            stream: Stream(values[2] as u16),
            pool: Pool(values[3] as u16),
        };
        index += 1;
        match action {
            "alloc" => {
                allocator.apply(index, alloc(&values)).unwrap();
                expected.are(allocator.actions(), &place);
                assert_eq!(allocator.block_address(object), Some(values[4]), "{place}");
            }
            "oom" => {
                let oom = allocator.apply(index, alloc(&values)).unwrap_err();
                assert_eq!(oom.requested, Bytes::new(values[1]), "{place}");
                expected.0.push(Action::Oom(Bytes::new(values[4])));
                expected.are(allocator.actions(), &place);
            }
            "request" => allocator.apply(index, Event::FreeRequested(object)).unwrap(),
            "free" => allocator.apply(index, Event::Free(object)).unwrap(),
            "empty_cache" => {
                allocator.empty_cache(GPU);
                emptied = true;
            }
            "no_split" => allocator.set_no_split(GPU, Pool(values[0] as u16)),
            "release_pool" => allocator.release_pool(GPU, Pool(values[0] as u16)),
            "counts" => {
                let stats = allocator.stats(GPU).unwrap();
                let found = [
                    stats.num_alloc_retries,
                    stats.num_ooms,
                    stats.num_sync_all_streams,
                    stats.num_device_alloc,
                    stats.num_device_free,
                ];
                assert_eq!(found, values[..], "{place}");
            }
            _ => panic!("{place}"),
        }
    }
    assert!(expected.0.is_empty(), "{name}");
}

fn operands(text: &str) -> Vec<u64> {
    text.split_whitespace().map(|value| value.parse().unwrap()).collect()
}

fn statistic(allocator: &CachingAllocator, name: &str) -> Stat {
    let entries: HashMap<String, u64> = allocator.stats(GPU).unwrap().entries().into_iter().collect();
    let value = |kind: &str| entries[&format!("{name}.{kind}")];
    Stat {
        current: value("current"),
        peak: value("peak"),
        allocated: value("allocated"),
        freed: value("freed"),
    }
}

#[test]
fn pytorch_did_the_same() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/truth/allocator");
    let mut runs = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let mut text = String::new();
        GzDecoder::new(File::open(&path).unwrap()).read_to_string(&mut text).unwrap();
        check(&path.file_name().unwrap().to_string_lossy(), &text);
        runs += 1;
    }
    assert!(runs > 0);
}
