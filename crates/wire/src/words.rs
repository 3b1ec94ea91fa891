//! The ledger's words as JSON strings.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

macro_rules! json_words {
    ($($(#[$doc:meta])* $name:ident: $what:literal),+ $(,)?) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(pub ledger::$name);

        impl Serialize for $name {
            fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
                serializer.serialize_str(self.0.as_str())
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
                let word = Cow::<str>::deserialize(deserializer)?;
                word.parse().map(Self).map_err(|()| D::Error::custom(format!(concat!("unknown ", $what, " `{}`"), ledger::clip(&word))))
            }
        }

        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(_: &mut SchemaGenerator) -> Schema {
                let words: Vec<&str> = ledger::$name::ALL.iter().map(|word| word.as_str()).collect();
                json_schema!({ "type": "string", "enum": words })
            }
        }
    )+};
}

json_words! {
    /// What an object is for.
    Category: "category",
    /// What a total counts.
    Measure: "measure",
    /// Where the numbers come from.
    Provenance: "provenance",
    /// What a reconciliation asks to look at.
    Signal: "signal",
}
