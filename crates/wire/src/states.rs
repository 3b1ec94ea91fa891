//! Hand-written states: a JSON list, or `{"states": [...], "phases": [...]}` with own phase names.

use std::borrow::Cow;
use std::fmt;

use ledger::{Category, Entry, States};
use schemars::JsonSchema;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, SeqAccess, Visitor};

use crate::ReadError;

/// The two forms of a file of states, for the schema: reading is stricter than a schema can say.
#[derive(JsonSchema)]
#[schemars(untagged)]
#[expect(dead_code, reason = "it is there for its schema")]
pub(crate) enum StatesSchema {
    /// States on the six phases of a training step.
    List(Vec<StateSchema>),
    /// States on a timeline with its own phase names.
    Timeline {
        /// The states.
        states: Vec<StateSchema>,
        /// The names of the phases, in order; the six of a training step where left out.
        phases: Option<Vec<String>>,
    },
}

/// One hand-written state.
#[derive(JsonSchema)]
#[expect(dead_code, reason = "it is there for its schema")]
pub(crate) struct StateSchema {
    /// Its name, unlike every other.
    #[schemars(length(min = 1))]
    name: String,
    /// One of the seven categories of the specification.
    #[schemars(extend("enum" = hand_written()))]
    category: String,
    /// Its size in MiB; below 2^53 bytes.
    #[schemars(range(min = 0))]
    size_mb: f64,
    /// The first phase it is there in.
    start_phase: String,
    /// The last phase it is there in.
    end_phase: String,
    /// `gpu` or `cpu`.
    #[schemars(extend("enum" = ["gpu", "cpu"]))]
    device: String,
    /// Whether it lives on from step to step; totals of phases do not depend on it.
    persistent: bool,
}

fn hand_written() -> Vec<&'static str> {
    Category::ALL
        .iter()
        .filter(|category| category.is_hand_written())
        .map(|category| category.as_str())
        .collect()
}

/// The form with own phase names.
#[derive(serde::Deserialize)]
struct Timeline {
    states: Vec<RawState>,
    phases: Option<Vec<String>>,
}

/// Reads the list form.
pub(crate) fn read_list(json: &[u8]) -> Result<States, ReadError> {
    let raw: Vec<RawState> = serde_json::from_slice(json).map_err(unreadable)?;
    check(States::default(), &raw)
}

/// Reads the form with `states` and perhaps `phases`.
pub(crate) fn read_timeline(json: &[u8]) -> Result<States, ReadError> {
    let raw: Timeline = serde_json::from_slice(json).map_err(unreadable)?;
    let states = raw.phases.map_or_else(|| Ok(States::default()), States::with_phases)?;
    check(states, &raw.states)
}

fn unreadable(error: serde_json::Error) -> ReadError {
    ReadError::json("states", &error)
}

fn check(mut states: States, raw: &[RawState]) -> Result<States, ReadError> {
    if raw.is_empty() {
        return Err(ledger::StateError::Empty.into());
    }
    for (index, state) in raw.iter().enumerate() {
        let name = if let Field::Text(name) = state.get("name") { Some(ledger::clip(name)) } else { None };
        let entry = state.entry().map_err(|problem| ReadError::State { index, name, problem })?;
        states.push(entry)?;
    }
    Ok(states)
}

/// The fields of a state, as they were found.
struct RawState {
    fields: [Field; FIELDS.len()],
    doubled: Option<&'static str>,
    /// What was found in place of an object.
    instead: Option<&'static str>,
}

const FIELDS: [&str; 7] = ["name", "category", "size_mb", "start_phase", "end_phase", "device", "persistent"];

impl RawState {
    fn get(&self, name: &str) -> &Field {
        FIELDS.iter().position(|field| *field == name).map_or(&Field::Missing, |index| &self.fields[index])
    }

    /// The state, every field of the type it should have.
    fn entry(&self) -> Result<Entry<'_>, String> {
        if let Some(found) = self.instead {
            return Err(format!("this is {found}, where an object is needed"));
        }
        if let Some(field) = self.doubled {
            return Err(format!("`{field}` is there twice"));
        }
        let missing: Vec<String> = (FIELDS.iter().zip(&self.fields))
            .filter(|(_, field)| matches!(field, Field::Missing))
            .map(|(name, _)| format!("`{name}`"))
            .collect();
        if !missing.is_empty() {
            return Err(format!("{} is missing", missing.join(", ")));
        }
        let text = |name: &str| match self.get(name) {
            Field::Text(text) => Ok(text.as_str()),
            other => Err(format!("`{name}` is {}, where a text is needed", other.kind())),
        };
        let size_mib = match self.get("size_mb") {
            Field::Number(size) => *size,
            other => return Err(format!("`size_mb` is {}, where a number is needed", other.kind())),
        };
        let persistent = match self.get("persistent") {
            Field::Bool(persistent) => *persistent,
            other => return Err(format!("`persistent` is {}, where true or false is needed", other.kind())),
        };
        Ok(Entry {
            name: text("name")?,
            category: text("category")?,
            size_mib,
            start_phase: text("start_phase")?,
            end_phase: text("end_phase")?,
            device: text("device")?,
            persistent,
        })
    }
}

impl<'de> Deserialize<'de> for RawState {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyVisitor).map(|any| match any {
            Any::Object(state) => *state,
            Any::Field(field) => {
                let fields = std::array::from_fn(|_| Field::Missing);
                Self { fields, doubled: None, instead: Some(field.kind()) }
            }
        })
    }
}

/// The value of a field, as far as a state needs it.
pub(crate) enum Field {
    Missing,
    Null,
    Bool(bool),
    Number(f64),
    Text(String),
    List,
    Object,
}

impl Field {
    /// What it is, for a message.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Missing => "missing",
            Self::Null => "null",
            Self::Bool(_) => "a boolean",
            Self::Number(_) => "a number",
            Self::Text(_) => "a text",
            Self::List => "a list",
            Self::Object => "an object",
        }
    }
}

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(AnyVisitor).map(|any| match any {
            Any::Object(_) => Self::Object,
            Any::Field(field) => field,
        })
    }
}

/// Any JSON value: the fields of a state where it is an object.
enum Any {
    Object(Box<RawState>),
    Field(Field),
}

struct AnyVisitor;

impl<'de> Visitor<'de> for AnyVisitor {
    type Value = Any;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Any, E> {
        Ok(Any::Field(Field::Null))
    }

    fn visit_bool<E>(self, value: bool) -> Result<Any, E> {
        Ok(Any::Field(Field::Bool(value)))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Any, E> {
        Ok(Any::Field(Field::Number(value as f64)))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Any, E> {
        Ok(Any::Field(Field::Number(value as f64)))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Any, E> {
        Ok(Any::Field(Field::Number(value)))
    }

    fn visit_str<E>(self, value: &str) -> Result<Any, E> {
        Ok(Any::Field(Field::Text(value.into())))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Any, A::Error> {
        while list.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Any::Field(Field::List))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Any, A::Error> {
        let fields = std::array::from_fn(|_| Field::Missing);
        let mut state = Box::new(RawState { fields, doubled: None, instead: None });
        while let Some(key) = object.next_key::<Cow<'_, str>>()? {
            let Some(index) = FIELDS.iter().position(|field| *field == key) else {
                object.next_value::<IgnoredAny>()?;
                continue;
            };
            if !matches!(state.fields[index], Field::Missing) {
                state.doubled = Some(FIELDS[index]);
            }
            state.fields[index] = object.next_value()?;
        }
        Ok(Any::Object(state))
    }
}
