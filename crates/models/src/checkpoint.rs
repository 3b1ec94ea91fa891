//! Which layers of a model are recomputed in backward, and how.

use std::fmt;
use std::ops::Range;
use std::rc::Rc;

use std::str::FromStr;

use engine::{KEEPABLE, Pinning, Recompute, Tensor, checkpoint};

use crate::setup::{Offload, Setup};

/// Activation checkpointing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub enum Checkpoint {
    /// Every saved tensor is kept.
    #[default]
    None,
    /// Every layer is recomputed.
    Full,
    /// One of so many layers is, the first layer included (`every_n_layers` of transformers).
    Every(u64),
    /// These layers are, counted from 0, in ascending order.
    Layers(Vec<u64>),
    /// Segments of so many consecutive layers are, each as one; layers after the last segment are not.
    Segments(Vec<u64>),
    /// Every layer is, but for the results of these operators
    /// (`torch.utils.checkpoint.create_selective_checkpoint_contexts`).
    Selective(Vec<&'static str>),
}

/// What a checkpoint may be, for a user who wrote something else.
const FORMS: &str = "none, full, every:K, layers:0,2,…, segments:K,NxK,… or selective:OPERATOR,…";

impl FromStr for Checkpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numbers = |list: &str, least: u64| -> Result<Vec<u64>, String> {
            let number = |text: &str| text.trim().parse().ok().filter(|number| *number >= least);
            let numbers: Option<Vec<u64>> = list.split(',').map(number).collect();
            numbers.ok_or_else(|| format!("`{list}` must be whole numbers of at least {least}"))
        };
        match text.split_once(':') {
            None if text == "none" => Ok(Self::None),
            None if text == "full" => Ok(Self::Full),
            Some(("every", count)) => match numbers(count, 1)?[..] {
                [count] => Ok(Self::Every(count)),
                _ => Err("every:K has one number".into()),
            },
            Some(("layers", list)) => {
                let mut layers = numbers(list, 0)?;
                layers.sort_unstable();
                layers.dedup();
                Ok(Self::Layers(layers))
            }
            Some(("segments", list)) => segments(list).map(Self::Segments).ok_or_else(|| {
                format!("`{list}` must be numbers of layers, or NxK for N segments of K layers")
            }),
            Some(("selective", list)) => {
                let operators: Result<Vec<_>, _> =
                    list.split(',').map(|name| operator(name.trim())).collect();
                let mut operators = operators?;
                operators.sort_unstable();
                operators.dedup();
                Ok(Self::Selective(operators))
            }
            _ => Err(format!("it is {FORMS}")),
        }
    }
}

/// The most segments that are written out.
const MOST_SEGMENTS: u64 = 1 << 20;

/// Layers of each segment: `4,4,2` or `2x4,2`.
fn segments(list: &str) -> Option<Vec<u64>> {
    let mut counts = Vec::new();
    for part in list.split(',') {
        let (times, count) = part.trim().split_once('x').unwrap_or(("1", part.trim()));
        let (times, count): (u64, u64) = (times.parse().ok()?, count.parse().ok()?);
        if times == 0 || count == 0 || times.saturating_add(counts.len() as u64) > MOST_SEGMENTS {
            return None;
        }
        counts.extend((0..times).map(|_| count));
    }
    Some(counts)
}

/// The operator behind a name, with or without `aten.` and `.default`.
fn operator(name: &str) -> Result<&'static str, String> {
    let bare = name.trim_start_matches("torch.ops.").trim_start_matches("aten.").trim_end_matches(".default");
    KEEPABLE.iter().copied().find(|known| *known == bare).ok_or_else(|| {
        format!("`{name}` is no operator whose results can be kept; they are {}", KEEPABLE.join(", "))
    })
}

impl fmt::Display for Checkpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, name: &str, numbers: &[u64]| {
            let numbers: Vec<String> = numbers.iter().map(u64::to_string).collect();
            write!(f, "{name}:{}", numbers.join(","))
        };
        match self {
            Self::None => f.write_str("none"),
            Self::Full => f.write_str("full"),
            Self::Every(count) => write!(f, "every:{count}"),
            Self::Layers(layers) => list(f, "layers", layers),
            Self::Segments(counts) => {
                let runs = counts.chunk_by(|a, b| a == b).map(|run| match run {
                    [count] => count.to_string(),
                    _ => format!("{}x{}", run.len(), run[0]),
                });
                write!(f, "segments:{}", runs.collect::<Vec<_>>().join(","))
            }
            Self::Selective(operators) => write!(f, "selective:{}", operators.join(",")),
        }
    }
}

/// Consecutive layers that are run as one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Segment {
    pub(crate) layers: Range<usize>,
    /// Whether they are run again in backward.
    pub(crate) recomputed: bool,
}

impl Checkpoint {
    /// The segments of a model of `layers` layers.
    fn segments(&self, layers: usize) -> Vec<Segment> {
        if let Self::Segments(counts) = self {
            let mut next = 0;
            let mut segment = |&count: &u64| {
                let first = next;
                next += count as usize;
                Segment { layers: first..next, recomputed: true }
            };
            let mut segments: Vec<Segment> = counts.iter().map(&mut segment).collect();
            let kept = |layer| Segment { layers: layer..layer + 1, recomputed: false };
            segments.extend((next..layers).map(kept));
            return segments;
        }
        let alone =
            |layer: usize| Segment { layers: layer..layer + 1, recomputed: self.recomputes(layer as u64) };
        (0..layers).map(alone).collect()
    }

    /// Whether layer `index` is run again in backward.
    fn recomputes(&self, index: u64) -> bool {
        match self {
            Self::None => false,
            Self::Full | Self::Segments(_) | Self::Selective(_) => true,
            Self::Every(count) => index.is_multiple_of(*count),
            Self::Layers(layers) => layers.contains(&index),
        }
    }

    /// Why a model of `layers` layers cannot be checkpointed so, where it cannot.
    pub(crate) fn problem(&self, layers: u64) -> Option<String> {
        match self {
            Self::Layers(listed) => listed.iter().find(|layer| **layer >= layers).map(|layer| {
                format!("`--checkpoint {self}`: there is no layer {layer}, the model has {layers} from 0 on")
            }),
            Self::Segments(counts) => {
                let sum = counts.iter().fold(0_u64, |sum, count| sum.saturating_add(*count));
                (sum > layers).then(|| {
                    format!("`--checkpoint {self}`: these are {sum} layers, and the model has {layers}")
                })
            }
            _ => None,
        }
    }

    /// Whether the first layer is recomputed.
    pub(crate) fn recomputes_first(&self) -> bool {
        self.recomputes(0)
    }
}

/// What a model reads of a setup's checkpointing.
#[derive(Clone, Debug)]
pub(crate) struct Checkpointing {
    checkpoint: Checkpoint,
    how: Recompute,
    arguments_on_host: bool,
}

impl Checkpointing {
    pub(crate) fn new(setup: &Setup) -> Self {
        let how = match &setup.checkpoint {
            _ if setup.checkpoint_reentrant => Recompute::Reentrant,
            Checkpoint::Selective(operators) => Recompute::AllBut(operators[..].into()),
            _ => Recompute::Values,
        };
        let arguments_on_host = setup.offloads(Offload::Checkpoints);
        Self { checkpoint: setup.checkpoint.clone(), how, arguments_on_host }
    }

    /// Whether any layer is recomputed: a model then keeps no cache.
    pub(crate) fn is_on(&self) -> bool {
        self.checkpoint != Checkpoint::None
    }

    /// The segments of `layers` layers, in order.
    pub(crate) fn segments(&self, layers: usize) -> Vec<Segment> {
        self.checkpoint.segments(layers)
    }

    /// Runs `segment` over `args`, to be run again in backward.
    pub(crate) fn run(&self, args: Vec<Tensor>, segment: impl Fn(&[Tensor]) -> Tensor + 'static) -> Tensor {
        if !self.arguments_on_host {
            return checkpoint(&self.how, args, segment);
        }
        let session = Rc::clone(args[0].session());
        session.saved_on_host(Pinning::Pinned, || checkpoint(&self.how, args, segment))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_form_is_written_as_it_is_read() {
        for text in [
            "none",
            "full",
            "every:2",
            "layers:0,2,5",
            "segments:2,3",
            "segments:4x1,2",
            "selective:_softmax,mm",
        ] {
            assert_eq!(text.parse::<Checkpoint>().unwrap().to_string(), text);
        }
        let named: Checkpoint = "selective:torch.ops.aten.mm.default, aten._softmax".parse().unwrap();
        assert_eq!(named.to_string(), "selective:_softmax,mm");
        assert_eq!("layers:2,0,2".parse::<Checkpoint>().unwrap().to_string(), "layers:0,2");
        assert_eq!("segments:1,1,2".parse::<Checkpoint>().unwrap().to_string(), "segments:2x1,2");
        for bad in [
            "",
            "half",
            "every:",
            "every:0",
            "every:1,2",
            "layers:-1",
            "segments:0,1",
            "segments:0x1",
            "segments:9999999999x1",
            "selective:nix",
        ] {
            assert!(bad.parse::<Checkpoint>().is_err(), "{bad}");
        }
    }

    #[test]
    fn every_layer_is_in_one_segment() {
        let of = |text: &str| -> Vec<(Range<usize>, bool)> {
            let segments = text.parse::<Checkpoint>().unwrap().segments(4);
            segments.into_iter().map(|segment| (segment.layers, segment.recomputed)).collect()
        };
        assert_eq!(of("every:3"), [(0..1, true), (1..2, false), (2..3, false), (3..4, true)]);
        assert_eq!(of("layers:1"), [(0..1, false), (1..2, true), (2..3, false), (3..4, false)]);
        assert_eq!(of("segments:1,3"), [(0..1, true), (1..4, true)]);
        assert_eq!(of("segments:1,2"), [(0..1, true), (1..3, true), (3..4, false)]);
        for (text, fits) in
            [("layers:3", true), ("layers:4", false), ("segments:2,2", true), ("segments:2,3", false)]
        {
            assert_eq!(text.parse::<Checkpoint>().unwrap().problem(4).is_none(), fits, "{text}");
        }
    }
}
