//! Enumerations whose members have a name in documents.

/// Defines an enumeration of words: `ALL`, `as_str`, and reading and printing by name.
macro_rules! words {
    ($(#[$outer:meta])* $type:ident { $($(#[$doc:meta])* $variant:ident = $name:literal),+ $(,)? }) => {
        $(#[$outer])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum $type { $($(#[$doc])* $variant),+ }

        impl $type {
            /// Every one, in order.
            pub const ALL: &[Self] = &[$(Self::$variant),+];

            /// The name used in documents.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name),+ }
            }
        }

        impl std::str::FromStr for $type {
            type Err = ();
            fn from_str(name: &str) -> Result<Self, ()> {
                match name { $($name => Ok(Self::$variant),)+ _ => Err(()) }
            }
        }

        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.as_str())
            }
        }
    };
}

pub(crate) use words;
