//! The settings string of `PYTORCH_CUDA_ALLOC_CONF` / `PYTORCH_ALLOC_CONF`, read as PyTorch reads it.
//!
//! PyTorch's reader is lenient in ways people meet: white space is dropped everywhere, the
//! separators `:` and `,` are skipped without being looked at, and a number ends at its first
//! character that is no digit (`25x` is 25). It is strict in others: a bound missed is an error.
//! `large_segment_size_mb` is read before all else, because two other bounds depend on it.

use ledger::Bytes;
use thiserror::Error;

use crate::rules::{LARGE_SEGMENT, MIB, MIN_BLOCK, MIN_LARGE, ROUND_LARGE, SMALL_LIMIT, SMALL_SEGMENT};

/// How the allocator is told to behave. [`Settings::default`] is what an empty string means.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Free blocks of this size and above are not split, and serve only requests that large;
    /// none: all blocks may be split (`max_split_size_mb`).
    pub max_split_size: Option<Bytes>,
    /// How much larger than the request an unsplittable block may be (`max_non_split_rounding_mb`;
    /// a large segment where it is not set).
    pub max_non_split_rounding: Bytes,
    /// The fraction of the allowed memory above which old cached blocks are given back before a
    /// new segment is taken (`garbage_collection_threshold`). Without a memory fraction below 1
    /// PyTorch never collects.
    pub garbage_collection_threshold: Option<f64>,
    /// The divisions between powers of two that sizes are rounded up to, for sizes from
    /// 1 MiB, 2 MiB, 4 MiB … 32 GiB; smaller sizes take the first, larger the last
    /// (`roundup_power2_divisions`). 0 and 1: rounded to 512 bytes only.
    pub roundup_power2_divisions: [u64; 16],
    /// Whether segments grow page by page (`expandable_segments`).
    pub expandable_segments: bool,
    /// The segment taken for requests between 1 and 10 MiB, and the page of the large pool's
    /// expandable segments (`large_segment_size_mb`).
    pub large_segment_size: Bytes,
    /// The fraction of the device that reserved memory may reach (`per_process_memory_fraction`,
    /// or `torch.cuda.set_per_process_memory_fraction`); none and 1: all of it.
    pub memory_fraction: Option<f64>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_split_size: None,
            max_non_split_rounding: Bytes::new(LARGE_SEGMENT),
            garbage_collection_threshold: None,
            roundup_power2_divisions: [0; 16],
            expandable_segments: false,
            large_segment_size: Bytes::new(LARGE_SEGMENT),
            memory_fraction: None,
        }
    }
}

/// Why PyTorch refuses a settings string. The sentences are those that PyTorch raises, where it
/// raises one.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SettingsError {
    /// A key stands at the end of the string, or a list is not closed.
    #[error("the allocator setting `{key}` ends before its value")]
    Unfinished {
        /// The key whose value is missing.
        key: String,
    },
    /// A value that should be a number is none.
    #[error("the allocator setting `{key}` takes a number, and `{value}` is none")]
    NotANumber {
        /// The key.
        key: String,
        /// What stands there.
        value: String,
    },
    /// A switch that is neither on nor off.
    #[error("Expected 'True' or 'False' at index {index} in ConfigTokenizer but got '{value}'")]
    NotABool {
        /// The position among the tokens of the string, counted from 0.
        index: usize,
        /// What stands there.
        value: String,
    },
    /// A value outside its bounds.
    #[error("{0}")]
    OutOfBounds(String),
}

/// What the reader of a settings string should know although it was accepted.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum SettingsWarning {
    /// A key that this release of PyTorch does not have; PyTorch raises an error.
    #[error("Unrecognized key '{key}' in Accelerator allocator config.")]
    UnknownKey {
        /// The key.
        key: String,
    },
    /// A setting that changes device memory in a way that is not modelled.
    #[error("the effect of the allocator setting `{key}:{value}` is not modelled")]
    NotModelled {
        /// The key.
        key: String,
        /// Its value.
        value: String,
    },
}

/// Keys of PyTorch 2.15 without an effect on the device memory that the allocator takes, and what
/// their value is.
const WITHOUT_EFFECT: &[(&str, Value)] = &[
    ("pinned_use_background_threads", Value::Bool),
    ("pinned_max_round_threshold_mb", Value::Integer),
    ("pinned_max_cached_size_mb", Value::Integer),
    ("release_lock_on_cudamalloc", Value::Bool),
    ("release_lock_on_hipmalloc", Value::Bool),
    ("pinned_use_cuda_host_register", Value::Bool),
    ("pinned_use_hip_host_register", Value::Bool),
    ("pinned_reserve_segment_size_mb", Value::Integer),
    ("pinned_num_register_threads", Value::Integer),
    ("pinned_free_catch_all", Value::Bool),
    ("graph_capture_record_stream_reuse", Value::Bool),
];

/// Keys with an effect that is left out, and what their value is.
const NOT_MODELLED: &[(&str, Value)] = &[
    ("throw_on_cudamalloc_oom", Value::Bool),
    ("expandable_segments_reserve", Value::Any),
    ("expandable_segments_reserve_by_class", Value::Any),
];

/// What a value must be.
#[derive(Clone, Copy)]
enum Value {
    Bool,
    Integer,
    Any,
}

impl Settings {
    /// Reads a settings string. Later keys win over earlier ones, as in PyTorch.
    ///
    /// # Errors
    /// What PyTorch raises for a known key with a bad value. An unknown key, where PyTorch raises
    /// too, is a warning: it may belong to another release.
    pub fn parse(text: &str) -> Result<(Self, Vec<SettingsWarning>), SettingsError> {
        let tokens = Tokens::new(text);
        let mut settings = Self::default();
        let mut warnings = Vec::new();
        for index in 0..tokens.len() {
            if tokens.at(index) == Some("large_segment_size_mb") {
                let mib = tokens.integer(index, index + 2)?;
                if mib <= MIN_LARGE / MIB {
                    let text = "CachingAllocator option large_segment_size_mb must be > 10 MB";
                    return Err(SettingsError::OutOfBounds(text.into()));
                }
                settings.large_segment_size = mebibytes(mib);
                settings.max_non_split_rounding = mebibytes(mib);
            }
        }
        let mut index = 0;
        while let Some(key) = tokens.at(index) {
            index = settings.parse_key(&tokens, key, index, &mut warnings)? + 2;
        }
        Ok((settings, warnings))
    }

    /// Reads the value of `key`, which stands at `index`, and gives the index of its last token.
    fn parse_key(
        &mut self,
        tokens: &Tokens,
        key: &str,
        index: usize,
        warnings: &mut Vec<SettingsWarning>,
    ) -> Result<usize, SettingsError> {
        let value = index + 2;
        match key {
            "large_segment_size_mb" => return Ok(value),
            "max_split_size_mb" => {
                self.max_split_size = Some(self.at_least_a_large_segment(tokens, key, index)?);
            }
            "max_non_split_rounding_mb" => {
                self.max_non_split_rounding = self.at_least_a_large_segment(tokens, key, index)?;
            }
            "garbage_collection_threshold" => {
                let threshold = tokens.float(index, value)?;
                if !(threshold > 0.0 && threshold < 1.0) {
                    let text = "garbage_collect_threshold is invalid, set it in (0.0, 1.0)";
                    return Err(SettingsError::OutOfBounds(text.into()));
                }
                self.garbage_collection_threshold = Some(threshold);
            }
            "per_process_memory_fraction" => {
                let fraction = tokens.float(index, value)?;
                if !(0.0..=1.0).contains(&fraction) {
                    let text = "per_process_memory_fraction is invalid, set it in [0.0, 1.0]";
                    return Err(SettingsError::OutOfBounds(text.into()));
                }
                self.memory_fraction = Some(fraction);
            }
            "expandable_segments" => self.expandable_segments = tokens.boolean(index, value)?,
            "roundup_power2_divisions" => return self.parse_divisions(tokens, index),
            "backend" => match tokens.value(index, value)? {
                "native" => {}
                "cudaMallocAsync" => {
                    let value = "cudaMallocAsync".to_owned();
                    warnings.push(SettingsWarning::NotModelled { key: key.into(), value });
                }
                _ => {
                    let text = "Unknown allocator backend, options are native and cudaMallocAsync";
                    return Err(SettingsError::OutOfBounds(text.into()));
                }
            },
            _ => {
                let known = |keys: &[(&str, Value)]| keys.iter().find(|(k, _)| *k == key).map(|(_, v)| *v);
                let modelled = known(WITHOUT_EFFECT);
                let Some(kind) = modelled.or_else(|| known(NOT_MODELLED)) else {
                    warnings.push(SettingsWarning::UnknownKey { key: key.into() });
                    return Ok(tokens.end_of_value(value).unwrap_or(tokens.len()));
                };
                match kind {
                    Value::Bool => drop(tokens.boolean(index, value)?),
                    Value::Integer => drop(tokens.integer(index, value)?),
                    Value::Any => drop(tokens.value(index, value)?),
                }
                let end = tokens
                    .end_of_value(value)
                    .ok_or_else(|| SettingsError::Unfinished { key: key.into() })?;
                if modelled.is_none() && tokens.at(value) != Some("False") {
                    let value = tokens.text(value, end);
                    warnings.push(SettingsWarning::NotModelled { key: key.into(), value });
                }
                return Ok(end);
            }
        }
        Ok(value)
    }

    /// A number of MiB that may not be below the large segment.
    fn at_least_a_large_segment(
        &self,
        tokens: &Tokens,
        key: &str,
        index: usize,
    ) -> Result<Bytes, SettingsError> {
        let mib = tokens.integer(index, index + 2)?;
        let least = self.large_segment_size.get() / MIB;
        if mib < least {
            let text = format!("CachingAllocator option {key} too small, must be >= {least}");
            return Err(SettingsError::OutOfBounds(text));
        }
        Ok(mebibytes(mib))
    }

    /// One number for all sizes, or a list `[256:1,512:2,>:4]` by size in MiB.
    fn parse_divisions(&mut self, tokens: &Tokens, index: usize) -> Result<usize, SettingsError> {
        let divisions = &mut self.roundup_power2_divisions;
        let mut at = index + 2;
        if tokens.value(index, at)? != "[" {
            let division = tokens.integer(index, at)?;
            if !division.is_power_of_two() {
                let text = "For roundups, the divisions has to be power of 2";
                return Err(SettingsError::OutOfBounds(text.into()));
            }
            divisions.fill(division);
            return Ok(at);
        }
        let mut last = 0;
        let mut first = true;
        loop {
            at += 1;
            let interval = tokens.value(index, at)?;
            if interval == "]" {
                return Ok(at);
            }
            at += 2;
            let division = tokens.integer(index, at)?;
            if division != 0 && !division.is_power_of_two() {
                let text = "For roundups, the divisions has to be power of 2 or 0 to disable roundup";
                return Err(SettingsError::OutOfBounds(text.into()));
            }
            if interval == ">" {
                divisions[last + 1..].fill(division);
            } else {
                let mib = tokens.integer(index, at - 2)?;
                if !mib.is_power_of_two() {
                    let text = "For roundups, the intervals have to be power of 2";
                    return Err(SettingsError::OutOfBounds(text.into()));
                }
                last = (mib.ilog2() as usize).min(divisions.len() - 1);
                if first {
                    divisions[..last].fill(division);
                    first = false;
                }
                divisions[last] = division;
            }
            if tokens.value(index, at + 1)? != "]" {
                at += 1;
            }
        }
    }

    /// The size of a block that serves a request of `bytes`, before any remainder that is not split
    /// off.
    pub fn round_size(&self, bytes: Bytes) -> Bytes {
        Bytes::new(self.round(bytes.get()))
    }

    /// The device memory taken for a block of the rounded size `bytes` when none is free and
    /// segments do not expand: what an out-of-memory message says was tried.
    pub fn segment_size(&self, bytes: Bytes) -> Bytes {
        Bytes::new(self.segment(bytes.get()))
    }

    /// Whether a block of the rounded size `bytes` is of the small pool.
    pub fn is_small(&self, bytes: Bytes) -> bool {
        bytes.get() <= SMALL_LIMIT
    }

    pub(crate) fn round(&self, bytes: u64) -> u64 {
        if bytes < MIN_BLOCK {
            return MIN_BLOCK;
        }
        let power = bytes.ilog2();
        let interval = power.saturating_sub(MIB.ilog2()).min(15) as usize;
        let divisions = self.roundup_power2_divisions[interval];
        if divisions > 1 && bytes / MIN_BLOCK >= divisions && bytes > MIN_BLOCK * divisions {
            // Both are powers of two, and the request is larger than a block for each division:
            // the step is at least one block.
            bytes.next_multiple_of((1 << power) >> divisions.ilog2())
        } else {
            bytes.next_multiple_of(MIN_BLOCK)
        }
    }

    pub(crate) fn segment(&self, rounded: u64) -> u64 {
        if rounded <= SMALL_LIMIT {
            SMALL_SEGMENT
        } else if rounded < MIN_LARGE {
            self.large_segment_size.get()
        } else {
            rounded.next_multiple_of(ROUND_LARGE)
        }
    }
}

/// `mib` times 2^20, at most the largest number of whole MiB that 64 bits hold, as PyTorch clamps it.
fn mebibytes(mib: u64) -> Bytes {
    Bytes::new(mib.min(u64::MAX / MIB) * MIB)
}

/// A settings string cut at `,`, `:`, `[` and `]`, without white space.
struct Tokens(Vec<String>);

impl Tokens {
    fn new(text: &str) -> Self {
        let mut tokens = Vec::new();
        let mut word = String::new();
        for character in text.chars() {
            if matches!(character, ',' | ':' | '[' | ']') {
                if !word.is_empty() {
                    tokens.push(std::mem::take(&mut word));
                }
                tokens.push(character.into());
            } else if !matches!(character, ' ' | '\t' | '\n' | '\x0b' | '\x0c' | '\r') {
                word.push(character);
            }
        }
        if !word.is_empty() {
            tokens.push(word);
        }
        Self(tokens)
    }

    fn len(&self) -> usize {
        self.0.len()
    }

    fn at(&self, index: usize) -> Option<&str> {
        self.0.get(index).map(String::as_str)
    }

    /// The token at `index`, which belongs to the key at `key`.
    fn value(&self, key: usize, index: usize) -> Result<&str, SettingsError> {
        self.at(index).ok_or_else(|| SettingsError::Unfinished { key: self.0[key].clone() })
    }

    /// The last token of the value that begins at `index`: itself, or the bracket that closes it.
    fn end_of_value(&self, index: usize) -> Option<usize> {
        match self.at(index)? {
            "[" => (index..self.len()).find(|end| self.0[*end] == "]"),
            _ => Some(index),
        }
    }

    /// The tokens from `first` to `last`, as they were written.
    fn text(&self, first: usize, last: usize) -> String {
        self.0[first..=last].concat()
    }

    fn boolean(&self, key: usize, index: usize) -> Result<bool, SettingsError> {
        match self.value(key, index)? {
            "True" => Ok(true),
            "False" => Ok(false),
            value => Err(SettingsError::NotABool { index, value: value.into() }),
        }
    }

    /// The digits a token begins with, as C's `stoull` takes them: a minus sign counts down from 2^64.
    fn integer(&self, key: usize, index: usize) -> Result<u64, SettingsError> {
        let value = self.value(key, index)?;
        let unsigned = value.strip_prefix(['+', '-']).unwrap_or(value);
        let digits = unsigned.find(|c: char| !c.is_ascii_digit()).unwrap_or(unsigned.len());
        let number: u64 = unsigned[..digits].parse().map_err(|_| self.not_a_number(key, index))?;
        Ok(if value.starts_with('-') { number.wrapping_neg() } else { number })
    }

    /// The decimal number a token begins with, as C's `stod` takes it.
    fn float(&self, key: usize, index: usize) -> Result<f64, SettingsError> {
        let value = self.value(key, index)?;
        let ends = value.char_indices().map(|(start, c)| start + c.len_utf8()).rev();
        ends.filter_map(|end| value[..end].parse().ok()).next().ok_or_else(|| self.not_a_number(key, index))
    }

    fn not_a_number(&self, key: usize, index: usize) -> SettingsError {
        SettingsError::NotANumber { key: self.0[key].clone(), value: self.0[index].clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn accepted(text: &str) -> Settings {
        let (settings, warnings) = Settings::parse(text).unwrap();
        assert_eq!(warnings, [], "{text}");
        settings
    }

    fn refused(text: &str) -> String {
        Settings::parse(text).unwrap_err().to_string()
    }

    fn warned(text: &str) -> Vec<String> {
        Settings::parse(text).unwrap().1.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn an_empty_string_means_the_defaults() {
        assert_eq!(accepted(""), Settings::default());
        assert_eq!(accepted("backend:native"), Settings::default());
    }

    #[test]
    fn every_setting_is_read() {
        let settings = accepted(
            "large_segment_size_mb:40,max_split_size_mb:128, max_non_split_rounding_mb: 64,\
             garbage_collection_threshold:0.6,per_process_memory_fraction:0.5,expandable_segments:True",
        );
        assert_eq!(settings.large_segment_size, Bytes::mib(40));
        assert_eq!(settings.max_split_size, Some(Bytes::mib(128)));
        assert_eq!(settings.max_non_split_rounding, Bytes::mib(64));
        assert_eq!(settings.garbage_collection_threshold, Some(0.6));
        assert_eq!(settings.memory_fraction, Some(0.5));
        assert!(settings.expandable_segments);
    }

    /// What `torch._C._accelerator_setAllocatorSettings` of torch 2.15 takes without a word.
    #[test]
    fn pytorch_is_lenient_here() {
        assert_eq!(accepted("max_split_size_mb:25x").max_split_size, Some(Bytes::mib(25)));
        assert_eq!(accepted("max_split_size_mb,30").max_split_size, Some(Bytes::mib(30)));
        assert_eq!(accepted("max_split_size_mb:+30,").max_split_size, Some(Bytes::mib(30)));
        assert_eq!(accepted("max_split_size_mb:30[").max_split_size, Some(Bytes::mib(30)));
        assert_eq!(accepted("max_split_size_mb:-5").max_split_size, Some(Bytes::new(u64::MAX - MIB + 1)));
        assert_eq!(accepted("garbage_collection_threshold:.5e0z").garbage_collection_threshold, Some(0.5));
        assert!(!accepted("expandable_segments:True,expandable_segments:False").expandable_segments);
        assert_eq!(accepted("roundup_power2_divisions:[]"), Settings::default());
    }

    /// What it raises.
    #[test]
    fn pytorch_refuses_these_with_these_sentences() {
        assert_eq!(
            refused("max_split_size_mb:19"),
            "CachingAllocator option max_split_size_mb too small, must be >= 20"
        );
        assert_eq!(
            refused("max_split_size_mb:20,large_segment_size_mb:100"),
            "CachingAllocator option max_split_size_mb too small, must be >= 100"
        );
        assert_eq!(
            refused("max_non_split_rounding_mb:1"),
            "CachingAllocator option max_non_split_rounding_mb too small, must be >= 20"
        );
        assert_eq!(
            refused("foo:1,large_segment_size_mb:10"),
            "CachingAllocator option large_segment_size_mb must be > 10 MB"
        );
        for threshold in ["0", "1.0", "nan", "inf", "-1"] {
            assert_eq!(
                refused(&format!("garbage_collection_threshold:{threshold}")),
                "garbage_collect_threshold is invalid, set it in (0.0, 1.0)"
            );
        }
        assert_eq!(
            refused("per_process_memory_fraction:2"),
            "per_process_memory_fraction is invalid, set it in [0.0, 1.0]"
        );
        assert_eq!(
            refused("expandable_segments:true"),
            "Expected 'True' or 'False' at index 2 in ConfigTokenizer but got 'true'"
        );
        assert_eq!(
            refused("backend:foo"),
            "Unknown allocator backend, options are native and cudaMallocAsync"
        );
        let not_a_power = "For roundups, the divisions has to be power of 2";
        assert_eq!(refused("roundup_power2_divisions:3"), not_a_power);
        assert_eq!(refused("roundup_power2_divisions:0"), not_a_power);
        assert_eq!(
            refused("roundup_power2_divisions:[64:3]"),
            "For roundups, the divisions has to be power of 2 or 0 to disable roundup"
        );
        assert_eq!(
            refused("roundup_power2_divisions:[63:8]"),
            "For roundups, the intervals have to be power of 2"
        );
    }

    #[test]
    fn a_value_that_is_missing_or_no_number_is_named() {
        for text in ["max_split_size_mb", "max_split_size_mb:"] {
            assert_eq!(refused(text), "the allocator setting `max_split_size_mb` ends before its value");
        }
        for text in ["[8", "[8:4", "[8:4,", "[8:4,16:2", ""] {
            assert_eq!(
                refused(&format!("roundup_power2_divisions:{text}")),
                "the allocator setting `roundup_power2_divisions` ends before its value"
            );
        }
        for value in ["x", "99999999999999999999999"] {
            assert_eq!(
                refused(&format!("max_split_size_mb:{value}")),
                format!("the allocator setting `max_split_size_mb` takes a number, and `{value}` is none")
            );
        }
    }

    #[test]
    fn unknown_keys_and_what_is_not_modelled_are_warnings() {
        assert_eq!(
            warned("foo:[1,2],bar:3,expandable_segments:True"),
            [
                "Unrecognized key 'foo' in Accelerator allocator config.",
                "Unrecognized key 'bar' in Accelerator allocator config."
            ]
        );
        assert_eq!(
            warned("max_split_size_mb:20;expandable_segments:True"),
            ["Unrecognized key 'True' in Accelerator allocator config."]
        );
        assert_eq!(
            warned("backend:cudaMallocAsync"),
            ["the effect of the allocator setting `backend:cudaMallocAsync` is not modelled"]
        );
        assert_eq!(
            warned("expandable_segments_reserve_by_class:[a:0.5,b:3G]"),
            [
                "the effect of the allocator setting `expandable_segments_reserve_by_class:[a:0.5,b:3G]` is not modelled"
            ]
        );
    }

    #[test]
    fn sizes_are_rounded_to_512_bytes_or_to_divisions_of_powers_of_two() {
        let round = |settings: &Settings, bytes| settings.round_size(Bytes::new(bytes)).get();
        let plain = Settings::default();
        assert_eq!([0, 1, 512, 513, 1025].map(|bytes| round(&plain, bytes)), [512, 512, 512, 1024, 1536]);

        let four = accepted("roundup_power2_divisions:4");
        // 1200 lies between 1024 and 2048, but is not larger than 4 * 512.
        assert_eq!(round(&four, 1200), 1536);
        assert_eq!(round(&four, 2049), 2560);
        assert_eq!(round(&four, (1 << 20) + 1), (1 << 20) + (1 << 18));
        assert_eq!(round(&four, 1 << 20), 1 << 20);

        // Below 256 MiB as 256, from 512 MiB unrounded, from 1 GiB in halves.
        let list = accepted("roundup_power2_divisions:[256:2,512:1,1024:2,>:8]");
        assert_eq!(list.roundup_power2_divisions[..12], [2, 2, 2, 2, 2, 2, 2, 2, 2, 1, 2, 8]);
        assert_eq!(round(&list, 3 << 18), 3 << 18);
        assert_eq!(round(&list, (512 << 20) + 1), (512 << 20) + 512);
    }
}
