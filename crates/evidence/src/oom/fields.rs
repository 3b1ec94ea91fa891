//! The fields of one message.

use std::sync::LazyLock;

use ledger::Bytes;
use regex::{Captures, Regex};

use super::forms::{FORMS, Form, Head};
use super::size::{self, Printed, SIZE};
use super::{Family, Message, Needs, OomWarning};
use crate::{Instant, Process};

/// The bytes of an element, by TensorFlow's names of types.
const BYTES_OF: [(&str, u64); 12] = [
    ("float", 4),
    ("half", 2),
    ("bfloat16", 2),
    ("double", 8),
    ("int32", 4),
    ("int64", 8),
    ("uint8", 1),
    ("int8", 1),
    ("bool", 1),
    ("int16", 2),
    ("complex64", 8),
    ("complex128", 16),
];

/// A field of the caching allocators' messages: what stands before its size and after it.
macro_rules! field {
    ($name:ident, $before:literal, $after:literal) => {
        static $name: LazyLock<Regex> = LazyLock::new(|| {
            Regex::new(&["(?i)", $before, SIZE, $after].concat())
                .expect("the form of a field is a regular expression")
        });
    };
}

field!(TOTAL_PAREN, "", "totalcapacity");
field!(TOTAL, "totalcapaci?tyof", "");
field!(ALLOCATED_PAREN, "", "alreadyallocated");
field!(ALLOCATED, "", "isallocatedbypytorch");
field!(ACTIVE, "", "currentactive");
field!(FREE_PAREN, r"[;(]", r"free(?-u:\b)");
field!(FREE, "ofwhich", "isfree");
field!(CACHED, "", "cached");
field!(RESERVED, "", "reservedintotal");
field!(ALLOWED, "", r"allowed(?-u:\b)");
field!(THIS_PROCESS, "thisprocesshas", "memoryinuse");
field!(PRIVATE, "with", "allocatedinprivatepools");
field!(UNALLOCATED, "", "isreservedbypytorchbutunallocated");
field!(OTHER_PROCESS, r"process([0-9]{1,19})has", "memoryinuse");
field!(MPS_ALLOCATED, "mpsallocated:", "");
field!(MPS_OTHER, "otherallocations:", "");
field!(MPS_ALLOWED, "maxallowed:", "");
field!(TRIED, "triedtoallocate", "");
field!(ASYNC_ALLOCATED, "currentlyallocated:", "");
field!(ASYNC_REQUESTED, "requested:", "");
field!(ASYNC_LIMIT, "devicelimit:", "");
field!(ASYNC_FREE, r"free\(accordingto[0-9A-Za-z_]{1,8}\):", "");
field!(ASYNC_ALLOWED, r"pytorchlimit\(setbyuser-suppliedmemoryfraction\):", "");
field!(XLA_PARAMETERS, "parameterallocation:", "");
field!(XLA_CONSTANTS, "constantallocation:", "");
field!(XLA_OUTPUTS, "maybe_live_outallocation:", "");
field!(XLA_TEMPORARIES, "tempallocation:", "");
field!(XLA_TOTAL, "totalallocation:", "");
field!(XLA_FRAGMENTATION, "totalfragmentation:", "");
field!(TPU_ARGUMENTS, "arguments", "");

static DEVICE: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(?i)(?:\((?:gpu|npu|xpu|mlu|musa|device|hpu)|(?-u:\b)(?:gpu|npu|xpu|mlu|musa|device|hpu)|\.(?:gpu|npu|xpu|mlu|musa))([0-9]{1,5})(?:;|has)")
        .expect("the form of a device is a regular expression")
});
static WARNED: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"\(free:([0-9]{1,20}),total:([0-9]{1,20})\)")
        .expect("the form of a field is a regular expression")
});
static BFC_STATISTIC: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"(Limit|InUse):([0-9]{1,20})").expect("the form of a field is a regular expression")
});
static MLX_LIMIT: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(r"maximumallowedbuffersizeof([0-9]{1,20})bytes")
        .expect("the form of a field is a regular expression")
});

/// The message that begins with `head`; `text` is it from its head on.
pub(super) fn read(head: &Head, text: &str) -> Message {
    let mut message = Message { family: head.form.family(), ..Message::default() };
    let form = FORMS.iter().find(|(form, _)| *form == head.form).map(|(_, regex)| regex);
    let Some(begin) = form.and_then(|regex| regex.captures(text)) else { return message };
    let text = &text[begin[0].len().min(text.len())..];
    match head.form {
        Form::Caching => caching(&mut message, &begin, text),
        Form::MallocAsync => malloc_async(&mut message, &begin, text),
        Form::WarningLine => {
            let instant = of_backend(&mut message, "cuda");
            instant.device = number(&begin, 1).and_then(|device| u32::try_from(device).ok());
            if let Some(figures) = WARNED.captures(text) {
                instant.free = number(&figures, 1).and_then(|free| i64::try_from(free).ok());
                instant.capacity = number(&figures, 2).map(Bytes::new);
            }
            message.requested = exact(&begin, 2);
        }
        Form::Mps => {
            let instant = of_backend(&mut message, "mps");
            instant.allocated = first(&MPS_ALLOCATED, text);
            instant.allowed = first(&MPS_ALLOWED, text);
            message.other = first(&MPS_OTHER, text);
            message.requested = printed(&TRIED, text);
        }
        Form::MpsBuffer => {
            of_backend(&mut message, "mps");
            message.requested = Printed::of(&begin, 1);
        }
        Form::Mlx => {
            let limit = MLX_LIMIT.captures(text).and_then(|limit| number(&limit, 1));
            of_backend(&mut message, "mlx").allowed = limit.map(Bytes::new);
            message.requested = exact(&begin, 1);
        }
        Form::Xla => {
            of_backend(&mut message, "jax");
            message.requested = Printed::of(&begin, 1);
            message.needs = needs(text);
        }
        Form::XlaUsed => {
            let instant = of_backend(&mut message, "jax");
            instant.capacity = Printed::of(&begin, 4).map(|capacity| capacity.nearest);
            let used = Printed::of(&begin, 2).map(|used| used.nearest);
            let parameters = first(&TPU_ARGUMENTS, text);
            message.needs = Some(Needs { total: used, parameters, ..Needs::default() });
        }
        Form::Bfc => {
            let instant = of_backend(&mut message, "xla/tf");
            for figure in BFC_STATISTIC.captures_iter(text) {
                let bytes = number(&figure, 2).map(Bytes::new);
                match &figure[1] {
                    "Limit" => instant.allowed = instant.allowed.or(bytes),
                    _ => instant.allocated = instant.allocated.or(bytes),
                }
            }
            message.requested = exact(&begin, 4).or_else(|| Printed::of(&begin, 2));
        }
        Form::TensorFlow => {
            of_backend(&mut message, "xla/tf").device = device_of_path(&begin[3]);
            message.requested = of_shape(&begin[1], &begin[2]);
        }
        Form::TensorFlowDriver => {
            of_backend(&mut message, "xla/tf");
            message.requested = exact(&begin, 1);
        }
        Form::Nccl => {
            of_backend(&mut message, "nccl");
            message.requested = exact(&begin, 1);
        }
        Form::NcclFailure => {
            of_backend(&mut message, "nccl");
        }
        Form::Cpu => {
            of_backend(&mut message, "cpu");
            message.requested = Printed::of(&begin, 1);
        }
        Form::Masked => {
            let library = begin.get(1).map_or("cuda".into(), |library| library.as_str().to_lowercase());
            of_backend(&mut message, &library);
        }
        Form::Bare => {
            let device = begin.get(1).map(|device| device.as_str().to_lowercase());
            let device = device.unwrap_or_else(|| match begin[0].as_bytes() {
                [b'h' | b'H', ..] => "hip".into(),
                [b'U' | b'Z' | b'P', ..] => "xpu".into(),
                _ => "cuda".into(),
            });
            of_backend(&mut message, &device);
        }
    }
    message.instant.requested = message.requested.map(|requested| requested.nearest);
    judge(&mut message);
    message
}

/// The instant of `message`, which is of `backend`.
fn of_backend<'a>(message: &'a mut Message, backend: &str) -> &'a mut Instant {
    message.instant.backend = Some(backend.into());
    &mut message.instant
}

/// The caching allocators: figures in parentheses, or in sentences.
fn caching(message: &mut Message, begin: &Captures<'_>, text: &str) {
    let instant = of_backend(message, &begin[1].to_lowercase());
    let device = DEVICE.captures(text).and_then(|device| number(&device, 1));
    instant.device = device.and_then(|device| u32::try_from(device).ok());
    let in_parentheses = first(&TOTAL_PAREN, text);
    instant.capacity = in_parentheses.or_else(|| first(&TOTAL, text));
    instant.allocated = first(&ALLOCATED_PAREN, text).or_else(|| first(&ALLOCATED, text));
    instant.active = first(&ACTIVE, text);
    instant.unallocated = first(&UNALLOCATED, text).or_else(|| first(&CACHED, text));
    instant.reserved = first(&RESERVED, text);
    instant.allowed = first(&ALLOWED, text);
    instant.process = first(&THIS_PROCESS, text);
    instant.private_pools = first(&PRIVATE, text);
    if let Some(allocated) = instant.allocated {
        match (instant.reserved, instant.unallocated) {
            (None, Some(unallocated)) => instant.reserved = allocated.checked_add(unallocated),
            (Some(reserved), None) => instant.unallocated = reserved.checked_sub(allocated),
            _ => {}
        }
    }
    let others = OTHER_PROCESS.captures_iter(text).filter_map(|found| {
        let bytes = Printed::of(&found, 2).map(|bytes| bytes.nearest);
        Some(Process { pid: number(&found, 1)?, name: None, bytes })
    });
    instant.processes = others.collect();
    let free = FREE.captures(text).or_else(|| FREE_PAREN.captures(text));
    let free = free.and_then(|free| size::signed(&free, 1));
    instant.free = free.map(|(free, _)| free);
    let sentences = instant.capacity.or(instant.free.map(|_| Bytes::ZERO)).or(instant.allocated).is_some();
    message.family = match (in_parentheses, sentences) {
        (Some(_), _) => Family::Paren,
        (None, true) => Family::Sentence,
        (None, false) => Family::Bare,
    };
    if free.is_some_and(|(_, wrapped)| wrapped) {
        message.warnings.push(OomWarning::FreeUnderflowed);
    }
    message.requested = Printed::of(begin, 2);
}

fn malloc_async(message: &mut Message, begin: &Captures<'_>, text: &str) {
    let instant = of_backend(message, "cuda");
    // The device of this message is that of the runtime, which the program need not know by this number.
    instant.device = number(begin, 1).and_then(|device| u32::try_from(device).ok());
    instant.allocated = first(&ASYNC_ALLOCATED, text);
    instant.capacity = first(&ASYNC_LIMIT, text);
    instant.allowed =
        first(&ASYNC_ALLOWED, text).filter(|allowed| instant.capacity.is_none_or(|all| *allowed < all));
    instant.free = ASYNC_FREE.captures(text).and_then(|free| Some(size::signed(&free, 1)?.0));
    message.requested = printed(&ASYNC_REQUESTED, text);
}

/// The statistics of XLA's program, where it shows them.
fn needs(text: &str) -> Option<Needs> {
    let needs = Needs {
        parameters: first(&XLA_PARAMETERS, text),
        constants: first(&XLA_CONSTANTS, text),
        outputs: first(&XLA_OUTPUTS, text),
        temporaries: first(&XLA_TEMPORARIES, text),
        total: first(&XLA_TOTAL, text),
        fragmentation: first(&XLA_FRAGMENTATION, text),
    };
    (needs != Needs::default()).then_some(needs)
}

/// What the figures of `message` say of each other.
fn judge(message: &mut Message) {
    let instant = &message.instant;
    let (free, capacity) = (instant.free, instant.capacity);
    let above = |free: i64, asked: Bytes| u64::try_from(free).is_ok_and(|free| free > asked.get());
    if free.zip(instant.requested).is_some_and(|(free, asked)| above(free, asked)) {
        message.warnings.push(OomWarning::FreeAboveRequest);
    }
    if instant.reserved.zip(capacity).is_some_and(|(reserved, capacity)| reserved > capacity) {
        message.warnings.push(OomWarning::ReservedAboveDevice);
    }
    // Where this process is not named, it is the one that can hold what its allocator holds.
    if instant.process.is_none()
        && let Some(reserved) = instant.reserved
    {
        let mut holders = instant.processes.iter().filter(|process| process.bytes >= Some(reserved));
        if let (Some(only), None) = (holders.next(), holders.next()) {
            message.own_process_guess = Some(only.pid);
        }
    }
}

fn printed(regex: &Regex, text: &str) -> Option<Printed> {
    Printed::of(&regex.captures(text)?, 1)
}

fn first(regex: &Regex, text: &str) -> Option<Bytes> {
    Some(printed(regex, text)?.nearest)
}

fn number(captures: &Captures<'_>, group: usize) -> Option<u64> {
    captures.get(group)?.as_str().parse().ok()
}

/// The size in `group` of `captures`, which is printed to the byte.
fn exact(captures: &Captures<'_>, group: usize) -> Option<Printed> {
    let bytes = Bytes::new(number(captures, group)?);
    (bytes <= Bytes::MAX).then(|| Printed::exact(bytes))
}

/// The bytes of a tensor of this shape and type, as TensorFlow prints them.
fn of_shape(shape: &str, dtype: &str) -> Option<Printed> {
    let element = BYTES_OF.iter().find(|(name, _)| *name == dtype)?.1;
    let mut bytes = Bytes::new(element);
    for extent in shape.split(',').filter(|extent| !extent.is_empty()) {
        bytes = bytes.checked_mul(extent.parse().ok()?)?;
    }
    Some(Printed::exact(bytes))
}

/// The number of the GPU at the end of TensorFlow's name of a device.
fn device_of_path(path: &str) -> Option<u32> {
    path.rsplit_once("GPU:")?.1.parse().ok()
}
