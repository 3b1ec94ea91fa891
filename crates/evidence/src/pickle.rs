//! A pickle machine that builds data and nothing else: no code is named, called or recursed into.
//!
//! It runs the opcodes of protocols 2 to 5 in one loop. Every opcode that could name or call code
//! is refused by name. Texts and tuples, which never change, are interned; lists and dicts are
//! nodes of an arena, so that an object reached twice through the memo is one object, and a list
//! that holds itself is no danger. A [`Builder`] may take a dict or a list over as soon as it has
//! its items: a file of millions of like dicts becomes columns without a tree in between.

use indexmap::IndexSet;
use thiserror::Error;

/// What a pickle may take of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Bytes of memory for everything that is built.
    pub memory: usize,
    /// How deep lists, dicts and tuples may stand in each other while they are read.
    pub depth: usize,
}

impl Limits {
    /// The limits for a file of `length` bytes: four times its length and 64 MiB, far above what a
    /// file needs that somebody meant.
    pub const fn for_length(length: usize) -> Self {
        Self { memory: length.saturating_mul(4).saturating_add(64 << 20), depth: 1000 }
    }
}

/// Why a pickle is not read.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[allow(missing_docs, reason = "the message says it")]
pub enum PickleError {
    #[error("it is no pickle of protocol 2 to 5: it begins with the byte {first:#04x}")]
    NotAPickle { first: u8 },
    #[error("it is a pickle of protocol {version}; protocols 2 to 5 are read")]
    Protocol { version: u8 },
    #[error(
        "`{opcode}` at byte {offset} would name or call code; plain data needs none, so the file is not read"
    )]
    Code { opcode: &'static str, offset: usize },
    #[error(
        "`{opcode}` at byte {offset} is an opcode that plain lists, dicts, texts and numbers do not need"
    )]
    Unsupported { opcode: &'static str, offset: usize },
    #[error("the byte {byte:#04x} at byte {offset} is no opcode: the file is damaged there or before")]
    UnknownOpcode { byte: u8, offset: usize },
    #[error("it breaks off at byte {offset}: the file is not complete")]
    Truncated { offset: usize },
    #[error("{what} at byte {offset}: the file is damaged there or before")]
    Malformed { what: &'static str, offset: usize },
    #[error(
        "at byte {offset} it needs more than {limit} {what}; it is no file that a program wrote in earnest"
    )]
    Limit { what: &'static str, limit: usize, offset: usize },
    #[error("{what} (before byte {offset})")]
    Refused { what: String, offset: usize },
}

/// A text of a [`Heap`], interned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Text(pub u32);

/// A tuple of a [`Heap`], interned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tuple(u32);

/// A list or dict of a [`Heap`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Node(u32);

/// A floating-point number that compares by its bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Real(u64);

impl Real {
    /// The number.
    pub const fn get(self) -> f64 {
        f64::from_bits(self.0)
    }
}

/// A value on the stack of the machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Value {
    /// Nothing.
    None,
    /// A truth value.
    Bool(bool),
    /// An integer below 2^63.
    Int(i64),
    /// An integer from 2^63 and below 2^64.
    Unsigned(u64),
    /// An integer of more than 64 bits, whose value is not kept.
    Huge,
    /// A floating-point number.
    Real(Real),
    /// A text.
    Text(Text),
    /// A tuple.
    Tuple(Tuple),
    /// A list.
    List(Node),
    /// A dict.
    Dict(Node),
}

/// What a [`Builder`] made of a list or dict: a row of one of its tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Built {
    /// Which table, from 1 to 14.
    pub table: u8,
    /// The row.
    pub row: u32,
}

/// What a list or dict holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contents<'a> {
    /// The items of a list; of a dict each key and its value.
    Items(&'a [Value]),
    /// A builder took it over.
    Built(Built),
}

/// Takes lists and dicts over while they are read.
pub trait Builder {
    /// The texts that the builder wants to find under [`Text`] 0, 1, 2 and so on.
    const VOCABULARY: &'static [&'static str];

    /// A dict got its first items, each key and its value; `Some` takes it over.
    ///
    /// # Errors
    /// A sentence that says why the file cannot be what the builder reads.
    fn dict(&mut self, heap: &mut Heap, items: &[Value]) -> Result<Option<Built>, String>;

    /// A list got more items, and is `before` if it was taken over when it got the last; `Some` takes it over.
    ///
    /// # Errors
    /// As [`Builder::dict`].
    fn list(
        &mut self,
        heap: &mut Heap,
        before: Option<Built>,
        items: &[Value],
    ) -> Result<Option<Built>, String>;

    /// The bytes of memory that the builder holds.
    fn memory(&self) -> usize;
}

/// Four bits of kind and 28 of index: what the memo and the arena hold millions of.
#[derive(Clone, Copy)]
struct Packed(u32);

impl Packed {
    const INDEX_BITS: u32 = 28;
    const LARGEST: usize = (1 << Self::INDEX_BITS) - 1;
    const ABSENT: Self = Self(u32::MAX);

    const fn new(kind: u8, index: u32) -> Self {
        Self((kind as u32) << Self::INDEX_BITS | index)
    }

    const fn kind(self) -> u8 {
        (self.0 >> Self::INDEX_BITS) as u8
    }

    const fn index(self) -> u32 {
        self.0 & Self::LARGEST as u32
    }
}

/// Kinds of a memo entry.
const TEXT: u8 = 0;
const TUPLE: u8 = 1;
const LIST: u8 = 2;
const DICT: u8 = 3;
const OTHER: u8 = 4;
/// The kind of a node that nobody took over; its index is that of its items, 0 for none.
const ITEMS: u8 = 0;

/// Everything a pickle holds that is not a plain number.
pub struct Heap {
    texts: IndexSet<Box<str>>,
    text_bytes: usize,
    tuples: IndexSet<Box<[Value]>>,
    nodes: Vec<Packed>,
    items: Vec<Vec<Value>>,
    /// Places in `items` whose node was taken over.
    vacant: Vec<u32>,
    item_bytes: usize,
}

impl Heap {
    fn new(vocabulary: &[&str]) -> Self {
        let texts = vocabulary.iter().map(|text| Box::from(*text)).collect();
        let items = vec![Vec::new()];
        let (tuples, nodes, vacant) = (IndexSet::new(), Vec::new(), Vec::new());
        Self { texts, text_bytes: 0, tuples, nodes, items, vacant, item_bytes: 0 }
    }

    /// The text behind `text`.
    pub fn text(&self, text: Text) -> &str {
        self.texts.get_index(text.0 as usize).map_or("", |text| text)
    }

    /// Every text, by its handle.
    pub fn into_texts(self) -> IndexSet<Box<str>> {
        self.texts
    }

    /// The values of `tuple`.
    pub fn tuple(&self, tuple: Tuple) -> &[Value] {
        self.tuples.get_index(tuple.0 as usize).map_or(&[], |values| values)
    }

    /// What the list or dict `node` holds.
    pub fn contents(&self, node: Node) -> Contents<'_> {
        let packed = self.nodes[node.0 as usize];
        match packed.kind() {
            ITEMS => Contents::Items(&self.items[packed.index() as usize]),
            table => Contents::Built(Built { table, row: packed.index() }),
        }
    }

    /// Gives the items of `node` up for what was built of them.
    pub fn finish(&mut self, node: Node, built: Built) {
        let packed = self.nodes[node.0 as usize];
        if packed.kind() == ITEMS && packed.index() != 0 {
            self.items[packed.index() as usize].clear();
            self.vacant.push(packed.index());
        }
        self.nodes[node.0 as usize] = Packed::new(built.table, built.row);
    }

    fn intern(&mut self, bytes: &[u8]) -> Text {
        // A lone surrogate, which Python writes and UTF-8 forbids, is not worth a file.
        let text = String::from_utf8_lossy(bytes);
        let index = self.texts.get_index_of(&*text).unwrap_or_else(|| {
            // The text, its handle, and its place in the table.
            self.text_bytes += text.len() + 64;
            self.texts.insert_full(text.into()).0
        });
        Text(index as u32)
    }

    fn intern_tuple(&mut self, values: &[Value]) -> Tuple {
        let index = self.tuples.get_index_of(values).unwrap_or_else(|| {
            self.item_bytes += size_of_val(values) + 64;
            self.tuples.insert_full(values.into()).0
        });
        Tuple(index as u32)
    }

    fn node(&mut self) -> Node {
        self.nodes.push(Packed::new(ITEMS, 0));
        Node(self.nodes.len() as u32 - 1)
    }

    /// The node, if a builder took it over.
    fn built(&self, node: Node) -> Option<Built> {
        match self.contents(node) {
            Contents::Built(built) => Some(built),
            Contents::Items(_) => None,
        }
    }

    fn extend(&mut self, node: Node, values: &[Value]) {
        if values.is_empty() {
            return;
        }
        let mut index = self.nodes[node.0 as usize].index();
        if index == 0 {
            index = self.vacant.pop().unwrap_or_else(|| {
                self.items.push(Vec::new());
                self.items.len() as u32 - 1
            });
            self.nodes[node.0 as usize] = Packed::new(ITEMS, index);
        }
        let items = &mut self.items[index as usize];
        let before = items.capacity();
        items.extend_from_slice(values);
        self.item_bytes += (items.capacity() - before) * size_of::<Value>();
    }

    fn memory(&self) -> usize {
        self.text_bytes
            + self.item_bytes
            + self.nodes.len() * size_of::<Packed>()
            + self.items.capacity() * size_of::<Vec<Value>>()
            + self.vacant.capacity() * size_of::<u32>()
    }
}

/// Reads the pickle in `input`: its value, what the value refers to, and the bytes it took.
///
/// # Errors
/// Where it is no pickle, or one that is damaged, holds code or goes beyond `limits`.
pub fn read<B: Builder>(
    input: &[u8],
    limits: Limits,
    builder: &mut B,
) -> Result<(Value, Heap, usize), PickleError> {
    match input {
        [] => return Err(PickleError::Truncated { offset: 0 }),
        [0x80, 2..=5, ..] => {}
        [0x80, version, ..] => return Err(PickleError::Protocol { version: *version }),
        [first, ..] => return Err(PickleError::NotAPickle { first: *first }),
    }
    let mut heap = Heap::new(B::VOCABULARY);
    // Room for what a file of this length is likely to need: a table that grows leaves holes behind
    // it, and memory that is not touched costs nothing.
    heap.nodes.reserve(input.len() / 64);
    let machine = Machine {
        input,
        at: 2,
        limits,
        builder,
        heap,
        stack: Vec::new(),
        marks: Vec::new(),
        memo: Vec::with_capacity(input.len() / 32),
        others: Vec::new(),
    };
    machine.run()
}

struct Machine<'a, B> {
    input: &'a [u8],
    /// The next byte to read.
    at: usize,
    limits: Limits,
    builder: &'a mut B,
    heap: Heap,
    stack: Vec<Value>,
    marks: Vec<usize>,
    memo: Vec<Packed>,
    /// Memoized values that no pickler of ours memoizes: numbers.
    others: Vec<Value>,
}

/// How many opcodes are run between two looks at the memory.
const STRIDE: u32 = 4096;

impl<B: Builder> Machine<'_, B> {
    fn run(mut self) -> Result<(Value, Heap, usize), PickleError> {
        let mut until_look = STRIDE;
        loop {
            until_look -= 1;
            if until_look == 0 {
                until_look = STRIDE;
                self.look_at_memory()?;
            }
            let offset = self.at;
            let [opcode] = self.bytes()?;
            match opcode {
                // MARK
                b'(' => {
                    if self.marks.len() >= self.limits.depth {
                        return Err(self.limit("open lists, dicts and tuples", self.limits.depth));
                    }
                    self.marks.push(self.stack.len());
                }
                // STOP
                b'.' => {
                    let value = self.pop()?;
                    return Ok((value, self.heap, self.at));
                }
                // BINGET, LONG_BINGET
                b'h' => {
                    let [index] = self.bytes()?;
                    self.get(u32::from(index))?;
                }
                b'j' => {
                    let index = self.u32()?;
                    self.get(index)?;
                }
                // MEMOIZE, BINPUT, LONG_BINPUT
                0x94 => self.put(self.memo.len())?,
                b'q' => {
                    let [index] = self.bytes()?;
                    self.put(usize::from(index))?;
                }
                b'r' => {
                    let index = self.u32()?;
                    self.put(index as usize)?;
                }
                // BININT1, BININT2, BININT, LONG1, LONG4
                b'K' => {
                    let [value] = self.bytes()?;
                    self.stack.push(Value::Int(i64::from(value)));
                }
                b'M' => {
                    let value = u16::from_le_bytes(self.bytes()?);
                    self.stack.push(Value::Int(i64::from(value)));
                }
                b'J' => {
                    let value = i32::from_le_bytes(self.bytes()?);
                    self.stack.push(Value::Int(i64::from(value)));
                }
                0x8a => {
                    let [length] = self.bytes()?;
                    let value = integer(self.take(usize::from(length))?);
                    self.stack.push(value);
                }
                0x8b => {
                    let length = self.u32()?;
                    let value = integer(self.take(length as usize)?);
                    self.stack.push(value);
                }
                // BINFLOAT, NONE, NEWTRUE, NEWFALSE
                b'G' => {
                    let bits = u64::from_be_bytes(self.bytes()?);
                    self.stack.push(Value::Real(Real(bits)));
                }
                b'N' => self.stack.push(Value::None),
                0x88 => self.stack.push(Value::Bool(true)),
                0x89 => self.stack.push(Value::Bool(false)),
                // SHORT_BINUNICODE, BINUNICODE, BINUNICODE8
                0x8c => {
                    let [length] = self.bytes()?;
                    self.text(u64::from(length))?;
                }
                b'X' => {
                    let length = self.u32()?;
                    self.text(u64::from(length))?;
                }
                0x8d => {
                    let length = u64::from_le_bytes(self.bytes()?);
                    self.text(length)?;
                }
                // EMPTY_TUPLE, TUPLE1, TUPLE2, TUPLE3, TUPLE
                b')' => self.tuple(self.stack.len())?,
                0x85..=0x87 => {
                    let count = usize::from(opcode - 0x84);
                    let from = self.stack.len().checked_sub(count);
                    self.tuple(from.ok_or_else(|| self.malformed("a tuple without its values"))?)?;
                }
                b't' => {
                    let from = self.end_mark()?;
                    self.tuple(from)?;
                }
                // EMPTY_LIST, EMPTY_DICT
                b']' => {
                    let node = self.new_node()?;
                    self.stack.push(Value::List(node));
                }
                b'}' => {
                    let node = self.new_node()?;
                    self.stack.push(Value::Dict(node));
                }
                // APPEND, APPENDS, SETITEM, SETITEMS
                b'a' => self.append(self.stack.len().saturating_sub(1))?,
                b'e' => {
                    let from = self.end_mark()?;
                    self.append(from)?;
                }
                b's' => self.set_items(self.stack.len().saturating_sub(2))?,
                b'u' => {
                    let from = self.end_mark()?;
                    self.set_items(from)?;
                }
                // FRAME: only says how much a reader may fetch at once.
                0x95 => {
                    let _length: [u8; 8] = self.bytes()?;
                }
                _ => return Err(refusal(opcode, offset)),
            }
        }
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], PickleError> {
        let rest = self.input.get(self.at..).and_then(<[u8]>::first_chunk::<N>);
        let bytes = *rest.ok_or(PickleError::Truncated { offset: self.input.len() })?;
        self.at += N;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, PickleError> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn take(&mut self, length: usize) -> Result<&[u8], PickleError> {
        let end = self.at.checked_add(length);
        let bytes = end.and_then(|end| self.input.get(self.at..end));
        let bytes = bytes.ok_or(PickleError::Truncated { offset: self.input.len() })?;
        self.at += length;
        Ok(bytes)
    }

    fn text(&mut self, length: u64) -> Result<(), PickleError> {
        let end = usize::try_from(length).ok().and_then(|length| self.at.checked_add(length));
        let bytes = end.and_then(|end| self.input.get(self.at..end));
        let bytes = bytes.ok_or(PickleError::Truncated { offset: self.input.len() })?;
        self.at += bytes.len();
        let text = self.heap.intern(bytes);
        self.countable(self.heap.texts.len())?;
        self.stack.push(Value::Text(text));
        Ok(())
    }

    fn tuple(&mut self, from: usize) -> Result<(), PickleError> {
        let tuple = self.heap.intern_tuple(&self.stack[from..]);
        self.countable(self.heap.tuples.len())?;
        self.stack.truncate(from);
        self.stack.push(Value::Tuple(tuple));
        Ok(())
    }

    fn new_node(&mut self) -> Result<Node, PickleError> {
        self.countable(self.heap.nodes.len() + 1)?;
        Ok(self.heap.node())
    }

    /// Whether `count` things can be named.
    fn countable(&self, count: usize) -> Result<(), PickleError> {
        if count > Packed::LARGEST {
            return Err(self.limit("objects", Packed::LARGEST));
        }
        Ok(())
    }

    #[inline]
    fn get(&mut self, index: u32) -> Result<(), PickleError> {
        let packed = self.memo.get(index as usize).copied().unwrap_or(Packed::ABSENT);
        let value = match packed.kind() {
            TEXT => Value::Text(Text(packed.index())),
            TUPLE => Value::Tuple(Tuple(packed.index())),
            LIST => Value::List(Node(packed.index())),
            DICT => Value::Dict(Node(packed.index())),
            OTHER => self.others[packed.index() as usize],
            _ => return Err(self.malformed("the memo is asked for what was never put there")),
        };
        self.stack.push(value);
        Ok(())
    }

    fn put(&mut self, index: usize) -> Result<(), PickleError> {
        let Some(value) = self.stack.last().copied() else {
            return Err(self.malformed("an empty stack is memoized"));
        };
        let packed = match value {
            Value::Text(text) => Packed::new(TEXT, text.0),
            Value::Tuple(tuple) => Packed::new(TUPLE, tuple.0),
            Value::List(node) => Packed::new(LIST, node.0),
            Value::Dict(node) => Packed::new(DICT, node.0),
            other => {
                self.others.push(other);
                self.countable(self.others.len())?;
                Packed::new(OTHER, self.others.len() as u32 - 1)
            }
        };
        if index >= self.memo.len() {
            // A pickler numbers its puts: none can be beyond the bytes read.
            if index > self.at {
                return Err(self.malformed("the memo has a gap"));
            }
            self.memo.resize(index + 1, Packed::ABSENT);
        }
        self.memo[index] = packed;
        Ok(())
    }

    fn pop(&mut self) -> Result<Value, PickleError> {
        self.stack.pop().ok_or_else(|| self.malformed("a value is missing"))
    }

    /// Ends the innermost mark: where its values begin.
    fn end_mark(&mut self) -> Result<usize, PickleError> {
        let from = self.marks.pop().filter(|from| *from <= self.stack.len());
        from.ok_or_else(|| self.malformed("a mark is missing"))
    }

    /// Appends what lies on the stack from `from` to the list below it.
    fn append(&mut self, from: usize) -> Result<(), PickleError> {
        let Some(Value::List(list)) = from.checked_sub(1).map(|below| self.stack[below]) else {
            return Err(self.malformed("something is appended to what is no list"));
        };
        let before = self.heap.built(list);
        let values = &self.stack[from..];
        match self.builder.list(&mut self.heap, before, values) {
            Ok(Some(built)) => {
                if before.is_none() && !matches!(self.heap.contents(list), Contents::Items([])) {
                    return Err(self.malformed("a list has items of two kinds"));
                }
                self.finish(list, built)?;
            }
            Ok(None) if before.is_some() => {
                return Err(self.malformed("a list grows after it was finished"));
            }
            Ok(None) => self.heap.extend(list, values),
            Err(what) => return Err(PickleError::Refused { what, offset: self.at }),
        }
        self.stack.truncate(from);
        Ok(())
    }

    /// Gives the dict below `from` the keys and values from there.
    fn set_items(&mut self, from: usize) -> Result<(), PickleError> {
        let Some(Value::Dict(dict)) = from.checked_sub(1).map(|below| self.stack[below]) else {
            return Err(self.malformed("an item is set in what is no dict"));
        };
        let items = &self.stack[from..];
        if items.len() % 2 == 1 {
            return Err(self.malformed("a key has no value"));
        }
        match self.heap.contents(dict) {
            Contents::Built(_) => return Err(self.malformed("a dict grows after it was finished")),
            Contents::Items([]) if !items.is_empty() => match self.builder.dict(&mut self.heap, items) {
                Ok(Some(built)) => self.finish(dict, built)?,
                Ok(None) => self.heap.extend(dict, items),
                Err(what) => return Err(PickleError::Refused { what, offset: self.at }),
            },
            Contents::Items(_) => self.heap.extend(dict, items),
        }
        self.stack.truncate(from);
        Ok(())
    }

    fn finish(&mut self, node: Node, built: Built) -> Result<(), PickleError> {
        self.countable(built.row as usize)?;
        self.heap.finish(node, built);
        Ok(())
    }

    fn look_at_memory(&self) -> Result<(), PickleError> {
        let used = self.heap.memory()
            + self.builder.memory()
            + self.stack.capacity() * size_of::<Value>()
            + self.others.capacity() * size_of::<Value>()
            + self.memo.len() * size_of::<Packed>();
        if used > self.limits.memory {
            return Err(self.limit("bytes of memory", self.limits.memory));
        }
        Ok(())
    }

    fn malformed(&self, what: &'static str) -> PickleError {
        PickleError::Malformed { what, offset: self.at }
    }

    fn limit(&self, what: &'static str, limit: usize) -> PickleError {
        PickleError::Limit { what, limit, offset: self.at }
    }
}

/// A little-endian two's-complement integer of any length.
fn integer(bytes: &[u8]) -> Value {
    let negative = bytes.last().is_some_and(|last| last & 0x80 != 0);
    let mut low = if negative { [0xff; 8] } else { [0; 8] };
    let (head, tail) = bytes.split_at(bytes.len().min(8));
    low[..head.len()].copy_from_slice(head);
    let value = u64::from_le_bytes(low);
    let sign = if negative { 0xff } else { 0 };
    if tail.iter().any(|byte| *byte != sign) {
        return Value::Huge;
    }
    match (i64::try_from(value), negative) {
        (Ok(value), false) => Value::Int(value),
        (Err(_), false) => Value::Unsigned(value),
        (Err(_), true) => Value::Int(value.cast_signed()),
        (Ok(_), true) => Value::Huge,
    }
}

/// Why the machine does not run `opcode`.
fn refusal(opcode: u8, offset: usize) -> PickleError {
    let code = match opcode {
        b'c' => "GLOBAL",
        b'i' => "INST",
        b'o' => "OBJ",
        b'b' => "BUILD",
        b'R' => "REDUCE",
        b'P' => "PERSID",
        b'Q' => "BINPERSID",
        0x81 => "NEWOBJ",
        0x82 => "EXT1",
        0x83 => "EXT2",
        0x84 => "EXT4",
        0x92 => "NEWOBJ_EX",
        0x93 => "STACK_GLOBAL",
        _ => "",
    };
    if !code.is_empty() {
        return PickleError::Code { opcode: code, offset };
    }
    let opcode = match opcode {
        b'0' => "POP",
        b'1' => "POP_MARK",
        b'2' => "DUP",
        b'F' => "FLOAT",
        b'I' => "INT",
        b'L' => "LONG",
        b'S' => "STRING",
        b'T' => "BINSTRING",
        b'U' => "SHORT_BINSTRING",
        b'V' => "UNICODE",
        b'B' => "BINBYTES",
        b'C' => "SHORT_BINBYTES",
        b'd' => "DICT",
        b'l' => "LIST",
        b'g' => "GET",
        b'p' => "PUT",
        0x80 => "PROTO",
        0x8e => "BINBYTES8",
        0x8f => "EMPTY_SET",
        0x90 => "ADDITEMS",
        0x91 => "FROZENSET",
        0x96 => "BYTEARRAY8",
        0x97 => "NEXT_BUFFER",
        0x98 => "READONLY_BUFFER",
        byte => return PickleError::UnknownOpcode { byte, offset },
    };
    PickleError::Unsupported { opcode, offset }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes nothing over.
    struct Nothing;

    impl Builder for Nothing {
        const VOCABULARY: &'static [&'static str] = &[];
        fn dict(&mut self, _: &mut Heap, _: &[Value]) -> Result<Option<Built>, String> {
            Ok(None)
        }
        fn list(&mut self, _: &mut Heap, _: Option<Built>, _: &[Value]) -> Result<Option<Built>, String> {
            Ok(None)
        }
        fn memory(&self) -> usize {
            0
        }
    }

    fn run(bytes: &[u8]) -> Result<(Value, Heap), PickleError> {
        let limits = Limits { memory: 1 << 20, depth: 10 };
        read(bytes, limits, &mut Nothing).map(|(value, heap, _)| (value, heap))
    }

    fn sentence(bytes: &[u8]) -> String {
        run(bytes).err().unwrap().to_string()
    }

    #[test]
    fn integers_of_every_length() {
        let value = |bytes: &[u8]| run(&[b"\x80\x02", bytes, b"."].concat()).unwrap().0;
        assert_eq!(value(b"K\xff"), Value::Int(255));
        assert_eq!(value(b"M\x00\x01"), Value::Int(256));
        assert_eq!(value(b"J\xff\xff\xff\xff"), Value::Int(-1));
        assert_eq!(value(b"\x8a\x00"), Value::Int(0));
        assert_eq!(value(b"\x8a\x02\x00\xff"), Value::Int(-256));
        assert_eq!(value(b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80"), Value::Int(i64::MIN));
        assert_eq!(value(b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x80\x00"), Value::Unsigned(1 << 63));
        assert_eq!(value(b"\x8b\x09\x00\x00\x00\xff\xff\xff\xff\xff\xff\xff\xff\xff"), Value::Int(-1));
        assert_eq!(value(b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\x01"), Value::Huge);
        assert_eq!(value(b"\x8a\x09\x00\x00\x00\x00\x00\x00\x00\x00\xff"), Value::Huge);
    }

    #[test]
    fn an_object_reached_through_the_memo_is_the_same_object() {
        // a = []; [a, a] with a filled after it was memoized.
        let (value, heap) = run(b"\x80\x04]\x94(]\x94(K\x01K\x02eh\x01e.").unwrap();
        let Value::List(outer) = value else { panic!("a list") };
        let Contents::Items([first, second]) = heap.contents(outer) else { panic!("two items") };
        assert_eq!(first, second);
        let Value::List(inner) = *first else { panic!("a list") };
        assert_eq!(heap.contents(inner), Contents::Items(&[Value::Int(1), Value::Int(2)]));
    }

    #[test]
    fn a_list_may_hold_itself() {
        let (value, heap) = run(b"\x80\x04]\x94h\x00a.").unwrap();
        let Value::List(list) = value else { panic!("a list") };
        assert_eq!(heap.contents(list), Contents::Items(&[value]));
    }

    #[test]
    fn code_is_refused_by_name_and_place() {
        for (opcode, name) in [
            (&b"cos\nsystem\n"[..], "GLOBAL"),
            (b"\x93", "STACK_GLOBAL"),
            (b"R", "REDUCE"),
            (b"b", "BUILD"),
            (b"i", "INST"),
            (b"o", "OBJ"),
            (b"\x81", "NEWOBJ"),
            (b"\x92", "NEWOBJ_EX"),
            (b"\x82", "EXT1"),
            (b"\x83", "EXT2"),
            (b"\x84", "EXT4"),
            (b"P", "PERSID"),
            (b"Q", "BINPERSID"),
        ] {
            let bytes = [b"\x80\x04N", opcode].concat();
            assert_eq!(run(&bytes).err(), Some(PickleError::Code { opcode: name, offset: 3 }));
        }
    }

    #[test]
    fn damage_is_told_with_its_place() {
        assert_eq!(sentence(b""), "it breaks off at byte 0: the file is not complete");
        assert_eq!(sentence(b"\x80\x06."), "it is a pickle of protocol 6; protocols 2 to 5 are read");
        assert_eq!(sentence(b"(dp0"), "it is no pickle of protocol 2 to 5: it begins with the byte 0x28");
        assert_eq!(sentence(b"\x80\x04\x8c\x05ab"), "it breaks off at byte 6: the file is not complete");
        assert_eq!(
            sentence(b"\x80\x04h\x07."),
            "the memo is asked for what was never put there at byte 4: the file is damaged there or before"
        );
        assert_eq!(
            sentence(b"\x80\x04\xee"),
            "the byte 0xee at byte 2 is no opcode: the file is damaged there or before"
        );
        assert_eq!(
            sentence(b"\x80\x04N2"),
            "`DUP` at byte 3 is an opcode that plain lists, dicts, texts and numbers do not need"
        );
        assert!(matches!(run(b"\x80\x04Na."), Err(PickleError::Malformed { .. })));
        assert!(matches!(run(b"\x80\x04}(Nu."), Err(PickleError::Malformed { .. })));
        assert!(matches!(run(b"\x80\x04Nr\xff\xff\xff\xff."), Err(PickleError::Malformed { .. })));
    }

    #[test]
    fn depth_and_memory_are_bounded() {
        let deep = [b"\x80\x04".to_vec(), b"(".repeat(11)].concat();
        assert!(matches!(run(&deep), Err(PickleError::Limit { what: "open lists, dicts and tuples", .. })));
        let wide = [b"\x80\x04".to_vec(), b"]".repeat(1 << 20)].concat();
        assert!(matches!(run(&wide), Err(PickleError::Limit { what: "bytes of memory", .. })));
    }
}
