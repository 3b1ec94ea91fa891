//! The tape's file form: what is written is read, and nothing that is read does harm.

#![allow(clippy::unwrap_used, reason = "a panic is how a test fails")]

#[path = "../../ledger/tests/tapes/mod.rs"]
mod tapes;

use ledger::{Bytes, Category, Device, DeviceKind, Dtype, Provenance, Tape, TapeError, Unit};
use proptest::prelude::*;
use wire::{About, Document, WriteError, read_tape, write_tape};

const LINE: &[u8] = b"vramledger-tape/1\n";

fn about() -> About {
    let mut about = About::new(Provenance::Measured);
    about.subject.insert("model".into(), "a model".into());
    about.warnings.push("one record was skipped".into());
    about
}

fn assert_same(a: &Tape, b: &Tape) {
    assert_eq!(a.unit, b.unit);
    assert_eq!(a.devices, b.devices);
    assert_eq!(a.phases, b.phases);
    assert_eq!(a.names(), b.names());
    assert_eq!(a.layouts(), b.layouts());
    assert_eq!(a.labels(), b.labels());
    assert_eq!(a.objects(), b.objects());
    assert_eq!(a.marks(), b.marks());
    assert!(a.events().eq(b.events()));
    assert!((0..=a.len()).all(|index| a.time_us(index) == b.time_us(index)));
}

/// A file with this body, well compressed.
fn file(body: &[u8]) -> Vec<u8> {
    let mut file = LINE.to_vec();
    file.extend(zstd::encode_all(body, 1).unwrap());
    file
}

fn body(file: &[u8]) -> Vec<u8> {
    zstd::decode_all(&file[LINE.len()..]).unwrap()
}

proptest! {
    #[test]
    fn what_is_written_is_read(tape in tapes::tape(true)) {
        let bytes = write_tape(&about(), &tape).unwrap();
        let (read_about, read) = read_tape(&bytes).unwrap();
        prop_assert_eq!(read_about, about());
        assert_same(&tape, &read);
        // The same tape is the same file.
        prop_assert_eq!(write_tape(&about(), &read).unwrap(), bytes.clone());
        prop_assert!(matches!(Document::read(&bytes), Ok(Document::Tape(_))));
    }

    #[test]
    fn a_cut_file_is_an_error(tape in tapes::tape(true), cut in any::<prop::sample::Index>()) {
        let bytes = write_tape(&about(), &tape).unwrap();
        prop_assert!(read_tape(&bytes[..cut.index(bytes.len())]).is_err());
        let body = body(&bytes);
        prop_assert!(read_tape(&file(&body[..cut.index(body.len())])).is_err());
    }

    #[test]
    fn changed_bytes_do_no_harm(
        tape in tapes::tape(true),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        compressed: bool,
    ) {
        let bytes = write_tape(&about(), &tape).unwrap();
        let mut changed = if compressed { bytes } else { body(&bytes) };
        for (at, byte) in changes {
            let at = at.index(changed.len());
            changed[at] = byte;
        }
        let changed = if compressed { changed } else { file(&changed) };
        if let Ok(Document::Tape(it)) = Document::read(&changed) {
            // Whatever is accepted can be replayed.
            ledger::replay(&it.1, None);
        }
    }

    #[test]
    fn random_bytes_do_no_harm(bytes in prop::collection::vec(any::<u8>(), 0..300)) {
        let _ = Document::read(&bytes);
        let _ = read_tape(&file(&bytes));
    }
}

/// The head of a file up to the number of names, which is left to the caller.
fn until_names() -> Vec<u8> {
    let about = serde_json::to_string(&about()).unwrap();
    let mut body = (about.len() as u32).to_le_bytes().to_vec();
    body.extend(about.as_bytes());
    body.extend([0, 0, 0, 0, 0]);
    body
}

fn error(body: &[u8]) -> String {
    read_tape(&file(body)).unwrap_err().to_string()
}

#[test]
fn a_count_without_its_bytes_takes_no_memory() {
    let with = |tail: &[u8]| [&until_names(), tail].concat();
    let limit = u32::MAX.to_le_bytes();
    assert_eq!(error(&with(&limit)), "the tape has 4294967295 names, where 4194304 are allowed");
    let (names, layouts, labels) = ([0; 4], [0; 4], [0; 4]);
    let objects = u64::MAX.to_le_bytes();
    assert!(error(&with(&[&names[..], &layouts, &labels, &objects].concat())).contains("ends early"));
    let (none, events) = ([0; 8], [[0xff; 8], [0; 8]].concat());
    assert!(error(&with(&[&names[..], &layouts, &labels, &none, &events].concat())).contains("ends early"));
    let text = [&1_u32.to_le_bytes()[..], &10_000_000_u32.to_le_bytes()].concat();
    assert!(error(&with(&text)).contains("ends early"));
    let text = [&1_u32.to_le_bytes()[..], &limit].concat();
    assert_eq!(error(&with(&text)), "the tape has a text of 4294967295 bytes, where 16777216 are allowed");
}

#[test]
fn what_follows_the_end_is_refused() {
    let bytes = write_tape(&about(), &Tape::new(Unit::Block, vec![])).unwrap();
    let longer = [&bytes[..], b"x"].concat();
    assert_eq!(read_tape(&longer).unwrap_err().to_string(), "the tape has more after its compressed part");
    let longer = [&body(&bytes)[..], b"x"].concat();
    assert_eq!(error(&longer), "the tape has more after its last event");
}

#[test]
fn a_doubled_name_is_refused() {
    let twice = [&2_u32.to_le_bytes()[..], &[1, 0, 0, 0, b'a', 1, 0, 0, 0, b'a']].concat();
    assert_eq!(error(&[&until_names()[..], &twice].concat()), "the tape has the same name at 0 and 1");
}

#[test]
fn an_inconsistent_tape_is_neither_written_nor_read() {
    let mut tape = Tape::new(Unit::Block, vec![]);
    tape.push(ledger::Event::Free(ledger::ObjectId(7)));
    let dangling = TapeError::Dangling { event: 0, what: "object", index: 7, count: 0 };
    match write_tape(&about(), &tape) {
        Err(WriteError::Inconsistent(error)) => assert_eq!(error, dangling),
        other => panic!("{other:?}"),
    }
}

#[test]
fn rows_of_a_ledger_are_bounded() {
    let device = Device { name: "d".into(), kind: DeviceKind::Gpu, capacity: None, context: None };
    let mut tape = Tape::new(Unit::Block, vec![device; 1 << 10]);
    let mark = ledger::Mark { step: 1, micro_batch: None, phase: ledger::Phase::FORWARD, text: None };
    (0..1 << 10).for_each(|_| tape.mark(mark));
    let most = write_tape(&about(), &tape).unwrap();
    assert!(read_tape(&most).is_ok());
    // One mark more: its count, its columns and what it says, put into the body by hand.
    let mut longer = body(&most);
    let events = longer.len() - 1024 * (19 + 14) - 16;
    longer[events..events + 8].copy_from_slice(&1025_u64.to_le_bytes());
    longer.truncate(events + 16);
    longer.extend(vec![9; 1025]);
    longer.extend(vec![0; 1025 * 18]);
    longer.extend([1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0].repeat(1025));
    assert_eq!(error(&longer), "the tape has more marks times devices than 1048576, which are allowed");
    tape.mark(mark);
    assert!(matches!(write_tape(&about(), &tape), Err(WriteError::TooMany { count: 1_049_600, .. })));
}

#[test]
fn the_codes_of_the_form_do_not_change() {
    // A file of every category, element type, unit and kind of device, byte by byte.
    let device = |kind| Device { name: "d".into(), kind, capacity: Some(Bytes::new(258)), context: None };
    let mut tape = Tape::new(Unit::Block, vec![device(DeviceKind::Gpu), device(DeviceKind::Cpu)]);
    tape.phases = vec!["p".into()];
    let name = tape.intern("n");
    let dtypes = [
        Dtype::Fp64,
        Dtype::Fp32,
        Dtype::Fp16,
        Dtype::Bf16,
        Dtype::Int64,
        Dtype::Int32,
        Dtype::Uint8,
        Dtype::Bool,
    ];
    for dtype in dtypes {
        tape.intern_layout(&ledger::Layout { dtype, shape: [].into() });
    }
    for category in Category::ALL {
        tape.intern_label(ledger::Label { name, owner: None, category: *category, saved: false });
    }
    let about = About::new(Provenance::Estimated);
    let body = body(&write_tape(&about, &tape).unwrap());
    let json = serde_json::to_string(&about).unwrap();
    let mut expected = (json.len() as u32).to_le_bytes().to_vec();
    expected.extend(json.as_bytes());
    expected.push(1);
    expected.extend([2, 0]);
    for kind in [0, 1] {
        expected.extend([1, 0, 0, 0, b'd', kind, 2, 1, 0, 0, 0, 0, 0, 0]);
        expected.extend([0xff; 8]);
    }
    expected.extend([1, 0, 1, 0, 0, 0, b'p']);
    expected.extend([1, 0, 0, 0, 1, 0, 0, 0, b'n']);
    expected.extend([8, 0, 0, 0]);
    (0..8).for_each(|dtype| expected.extend([dtype, 0]));
    expected.extend([11, 0, 0, 0]);
    (0..11).for_each(|category| expected.extend([1, 0, 0, 0, 0, 0, 0, 0, category, 0]));
    expected.extend([0; 8]);
    expected.extend([0; 16]);
    assert_eq!(body, expected);
}
