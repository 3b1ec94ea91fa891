//! A list of records in JSON, of which no more than one is held at once.

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::value::RawValue;
use serde_json::{Map, Value};

use super::LONGEST_LINE;
use super::rows::{Growing, Rows};

/// Where a trainer has its records.
const HISTORY: &str = "log_history";

/// The rows of the records in `json`.
pub(super) fn read(json: &[u8]) -> serde_json::Result<Rows> {
    let mut records = Records::default();
    let mut reader = serde_json::Deserializer::from_slice(json);
    (&mut records).deserialize(&mut reader)?;
    reader.end()?;
    Ok(records.growing.rows(records.odd))
}

/// Takes records over one after the other.
#[derive(Default)]
struct Records {
    growing: Growing,
    /// What is no record.
    odd: u64,
}

impl<'de> DeserializeSeed<'de> for &mut Records {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for &mut Records {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a list of records")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<(), A::Error> {
        while let Some(text) = list.next_element::<&RawValue>()? {
            let text = text.get();
            let record = (text.len() <= LONGEST_LINE && text.starts_with('{')).then_some(text);
            match record.and_then(|text| serde_json::from_str::<Map<String, Value>>(text).ok()) {
                Some(record) => self.growing.record(&record),
                None => self.odd += 1,
            }
        }
        Ok(())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut found = false;
        while let Some(key) = map.next_key::<String>()? {
            if key == HISTORY && !found {
                map.next_value_seed(&mut *self)?;
                found = true;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        if found { Ok(()) } else { Err(A::Error::missing_field(HISTORY)) }
    }
}
