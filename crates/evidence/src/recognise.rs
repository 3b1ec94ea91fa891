//! What a file is, by how it begins: a form of evidence, or something else with a name.

use std::borrow::Cow;
use std::cell::Cell;
use std::io::{self, Read};
use std::rc::Rc;

use flate2::read::MultiGzDecoder;

use crate::smi::smi;
use crate::summary::is_summary;

/// How many bytes of a file, unpacked, tell what it is.
pub const HEAD: usize = 1 << 16;

/// What a file is by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A pickle, as memory snapshots are.
    Pickle,
    /// A document of vramledger, hand-written states, or JSON that is to be told why it is neither.
    Document,
    /// A profiler trace.
    Trace,
    /// A memory timeline of the profiler.
    Timeline,
    /// A list of records, under `log_history` or alone.
    Records,
    /// Text of some form: see [`text_form`].
    Text,
    /// Nothing.
    Empty,
    /// Something else, by what it is called.
    Other(&'static str),
}

/// What a text is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TextForm {
    /// An out-of-memory message, maybe among other lines.
    OutOfMemory,
    /// The allocator's own account.
    Summary,
    /// What `nvidia-smi` prints.
    Smi,
    /// What may be a step log.
    Log,
    /// Something else, by what it is called.
    Other(&'static str),
}

/// A file that is being read, and what it is.
pub struct Opened<'a> {
    /// What it is by how it begins, unpacked.
    pub form: Form,
    /// Whether it is packed by gzip, so that a small file may be a large one.
    pub packed: bool,
    /// All of it, unpacked.
    pub source: Box<dyn Read + 'a>,
}

impl<'a> Opened<'a> {
    /// Looks at how `source` begins, inside of gzip where it is packed so.
    ///
    /// # Errors
    /// A source that cannot be read.
    pub fn new(source: impl Read + 'a) -> io::Result<Self> {
        let (head, source) = ahead(source)?;
        if head.starts_with(b"\x1f\x8b") {
            let (head, source) = ahead(Unpacked::new(source))?;
            return Ok(Self { form: recognise(&head), packed: true, source: Box::new(source) });
        }
        Ok(Self { form: recognise(&head), packed: false, source: Box::new(source) })
    }
}

/// How many bytes may come out of each that goes in, beyond the first [`FREE`]: evidence is packed to a tenth or a
/// fiftieth, and what is packed to a thousandth was made to fill a memory.
const RATIO: u64 = 200;
const FREE: u64 = 64 << 20;

/// A file unpacked from gzip, which does not grow beyond measure.
struct Unpacked<R> {
    decoder: MultiGzDecoder<Packed<R>>,
    /// What was read of the file.
    taken: Rc<Cell<u64>>,
    /// What came out of it.
    given: u64,
}

/// A file packed by gzip, of which what is read is counted.
struct Packed<R> {
    source: R,
    taken: Rc<Cell<u64>>,
}

impl<R: Read> Unpacked<R> {
    fn new(source: R) -> Self {
        let taken = Rc::new(Cell::new(0));
        let packed = Packed { source, taken: Rc::clone(&taken) };
        Self { decoder: MultiGzDecoder::new(packed), taken, given: 0 }
    }
}

impl<R: Read> Read for Packed<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.source.read(buffer)?;
        self.taken.set(self.taken.get() + read as u64);
        Ok(read)
    }
}

impl<R: Read> Read for Unpacked<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.decoder.read(buffer)?;
        self.given += read as u64;
        if self.given > FREE + RATIO * self.taken.get() {
            let told = format!("it unpacks to more than {RATIO} times its size, as no evidence does");
            return Err(io::Error::new(io::ErrorKind::InvalidData, told));
        }
        Ok(read)
    }
}

/// How `source` begins, and all of it.
fn ahead(mut source: impl Read) -> io::Result<(Vec<u8>, impl Read)> {
    let mut head = Vec::new();
    source.by_ref().take(HEAD as u64).read_to_end(&mut head)?;
    Ok((head.clone(), io::Cursor::new(head).chain(source)))
}

/// How files of other forms begin, and what they are called.
const MAGIC: [(&[u8], &str); 21] = [
    (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", "a checkpoint in the old form of torch.save"),
    (b"\x89PNG", "a PNG image"),
    (b"\xff\xd8\xff", "a JPEG image"),
    (b"GIF8", "a GIF image"),
    (b"%PDF", "a PDF document"),
    (b"\x7fELF", "a program or a library"),
    (b"MZ", "a Windows program"),
    (b"GGUF", "a GGUF checkpoint"),
    (b"\x89HDF", "an HDF5 file"),
    (b"SQLite format 3", "an SQLite database, as Nsight Systems exports"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"PAR1", "a Parquet file"),
    (b"ARROW1", "an Arrow file"),
    (b"\x28\xb5\x2f\xfd", "a file packed by zstd; unpack it first"),
    (b"\xfd7zXZ", "a file packed by xz; unpack it first"),
    (b"BZh", "a file packed by bzip2; unpack it first"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"Rar!", "a RAR archive"),
    (b"\x04\x22\x4d\x18", "a file packed by lz4; unpack it first"),
    (b"RIFF", "a media file"),
    (b"OggS", "a media file"),
];

/// What the file is that begins with `head`, at most [`HEAD`] bytes of it, unpacked.
pub fn recognise(head: &[u8]) -> Form {
    if let Some((_, name)) = MAGIC.iter().find(|(magic, _)| head.starts_with(magic)) {
        return Form::Other(name);
    }
    if head.starts_with(b"vramledger-tape/") {
        return Form::Document;
    }
    if head.starts_with(b"PK\x03\x04") {
        let names = |name: &[u8]| head.windows(name.len()).any(|window| window == name);
        let checkpoint = names(b"data.pkl") || names(b"/byteorder") || names(b"/.format_version");
        return Form::Other(if checkpoint {
            "a torch.save zip archive: a checkpoint"
        } else {
            "a zip archive"
        });
    }
    if is_safetensors(head) {
        return Form::Other("a safetensors checkpoint");
    }
    if head.get(257..262) == Some(b"ustar") {
        return Form::Other("a tar archive");
    }
    if head.get(..64).unwrap_or(head).windows(12).any(|window| window == b"brain.Event:") {
        return Form::Other("a TensorBoard event file; export its scalars as CSV");
    }
    if is_wide(head) {
        return Form::Text;
    }
    let text = head.strip_prefix(b"\xef\xbb\xbf").unwrap_or(head);
    let text = text.trim_ascii_start();
    match text.first() {
        None => Form::Empty,
        Some(b'{') => object(text),
        Some(b'[') => list(text),
        // Protocols of pickle from 2 on; the older ones are text that nobody writes a snapshot in.
        _ if head.starts_with(b"\x80") => Form::Pickle,
        _ if head.contains(&0) => Form::Other("a binary file of no known form"),
        _ => Form::Text,
    }
}

/// A safetensors file begins with the length of its heading and the heading, in JSON.
fn is_safetensors(head: &[u8]) -> bool {
    let Some((length, rest)) = head.split_first_chunk::<8>() else { return false };
    let length = u64::from_le_bytes(*length);
    (2..1 << 32).contains(&length) && rest.starts_with(b"{\"")
}

/// Whether the text is of 16-bit characters, as redirected output of Windows is.
fn is_wide(head: &[u8]) -> bool {
    head.starts_with(b"\xff\xfe") || head.starts_with(b"\xfe\xff")
}

fn object(text: &[u8]) -> Form {
    let (keys, rest) = keys(text);
    let has = |wanted: &[&str]| keys.iter().any(|key| wanted.contains(&key.as_str()));
    // A dict of Python is no JSON.
    if text.get(1..).is_some_and(|rest| rest.trim_ascii_start().starts_with(b"'")) {
        return Form::Text;
    }
    if has(&["traceEvents", "deviceProperties", "displayTimeUnit", "baseTimeNanoseconds", "distributedInfo"])
    {
        return Form::Trace;
    }
    if has(&["format", "states"]) {
        return Form::Document;
    }
    if has(&["log_history"]) {
        return Form::Records;
    }
    if has(&["weight_map"]) {
        return Form::Other("the index of a checkpoint's files");
    }
    if has(&["model_type", "architectures"]) {
        return Form::Other("a model's config.json: `vramledger plan` reads it");
    }
    if has(&["cells", "nbformat"]) {
        return Form::Other("a notebook");
    }
    let statistics = keys.iter().any(|key| key.contains(".all."));
    let another = rest.is_some_and(|rest| rest.starts_with(b"{"));
    let record = keys.iter().any(|key| crate::log::is_memory(key)) && !has(&["segments", "device_traces"]);
    if statistics || another || record { Form::Text } else { Form::Document }
}

fn list(text: &[u8]) -> Form {
    let inside = text.get(1..).unwrap_or_default().trim_ascii_start();
    match inside.first() {
        Some(b'[') => Form::Timeline,
        Some(b'{') => {
            let (keys, _) = keys(inside);
            let has = |wanted: &str| keys.iter().any(|key| key == wanted);
            if has("ph") {
                return Form::Trace;
            }
            let states = has("size_mb") || has("category");
            let record = keys.iter().any(|key| crate::log::is_memory(key));
            if record && !states { Form::Records } else { Form::Document }
        }
        // A line of a log may begin with `[rank0]`.
        Some(byte) if byte.is_ascii_alphabetic() => Form::Text,
        Some(byte) if byte.is_ascii_digit() => match inside.iter().find(|byte| matches!(byte, b']' | b',')) {
            Some(b']') => Form::Text,
            _ => Form::Document,
        },
        _ => Form::Document,
    }
}

/// The keys of the object that begins `text`, as far as it goes, and what follows it.
fn keys(text: &[u8]) -> (Vec<String>, Option<&[u8]>) {
    let mut keys = Vec::new();
    let (mut depth, mut at, mut expects_key) = (0_usize, 0, false);
    while let Some(byte) = text.get(at) {
        match byte {
            b'"' => {
                let start = at + 1;
                at = start;
                while let Some(byte) = text.get(at).filter(|byte| **byte != b'"') {
                    at += if *byte == b'\\' { 2 } else { 1 };
                }
                if depth == 1 && expects_key {
                    let key = text.get(start..at).unwrap_or_default();
                    keys.push(String::from_utf8_lossy(key).into_owned());
                    expects_key = false;
                }
            }
            b'{' | b'[' => {
                depth += 1;
                expects_key |= depth == 1;
            }
            b'}' | b']' => {
                depth = depth.saturating_sub(1);
                if depth == 0 {
                    return (keys, text.get(at + 1..).map(<[u8]>::trim_ascii_start));
                }
            }
            b',' if depth == 1 => expects_key = true,
            _ => {}
        }
        at += 1;
    }
    (keys, None)
}

/// The text in `bytes`: of 8-bit or of 16-bit characters, what is none of them replaced.
pub fn text(bytes: &[u8]) -> Cow<'_, str> {
    let wide = |unit: fn([u8; 2]) -> u16| {
        let units = bytes[2..].as_chunks::<2>().0.iter().map(|pair| unit(*pair));
        Cow::Owned(
            char::decode_utf16(units).map(|unit| unit.unwrap_or(char::REPLACEMENT_CHARACTER)).collect(),
        )
    };
    if bytes.starts_with(b"\xff\xfe") {
        wide(u16::from_le_bytes)
    } else if bytes.starts_with(b"\xfe\xff") {
        wide(u16::from_be_bytes)
    } else {
        String::from_utf8_lossy(bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes))
    }
}

/// What `text` is. `looks_like_oom` tells whether it has an out-of-memory message.
pub fn text_form(text: &str, looks_like_oom: impl Fn(&str) -> bool) -> TextForm {
    let start = text.trim_start();
    let begins = |words: &[&str]| {
        words.iter().any(|word| start.get(..word.len()).is_some_and(|head| head.eq_ignore_ascii_case(word)))
    };
    if begins(&["<!doctype html", "<html"]) {
        return TextForm::Other("an HTML page; the file it was made from is read");
    }
    if begins(&["<?xml", "<svg"]) {
        return TextForm::Other("an XML file");
    }
    if begins(&["-----BEGIN"]) {
        return TextForm::Other("a key or a certificate");
    }
    if begins(&["version https://git-lfs"]) {
        return TextForm::Other("a pointer of Git LFS; the file itself is not there");
    }
    if looks_like_oom(text) {
        return TextForm::OutOfMemory;
    }
    if is_summary(text) {
        return TextForm::Summary;
    }
    if smi(text).is_some() {
        return TextForm::Smi;
    }
    if begins(&["#!", "import ", "from ", "def ", "\"\"\""]) {
        return TextForm::Other("a program's source; `vramledger emulate` runs one");
    }
    TextForm::Log
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;

    use super::*;

    #[test]
    fn what_was_packed_to_fill_a_memory_is_refused() {
        let packed = |part: &[u8], times: usize| {
            let mut packed = GzEncoder::new(Vec::new(), Compression::best());
            for _ in 0..times {
                packed.write_all(part).unwrap();
            }
            packed.finish().unwrap()
        };
        let unpacked = |file: &[u8]| {
            let opened = Opened::new(file).unwrap();
            io::copy(&mut { opened.source }, &mut io::sink())
        };
        let blanks = vec![b' '; 1 << 20];
        assert_eq!(unpacked(&packed(&blanks, 16)).unwrap(), 16 << 20);
        let told = unpacked(&packed(&blanks, 160)).unwrap_err();
        assert!(told.to_string().contains("more than 200 times"), "{told}");
    }
}
