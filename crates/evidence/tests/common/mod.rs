//! Small pickles for tests, written as Python's pickler does.

#![allow(dead_code, reason = "each test file uses its part")]

/// What a pickle may hold.
#[derive(Clone, Debug)]
pub enum Value {
    None,
    Bool(bool),
    Int(i64),
    Text(String),
    Tuple(Vec<Value>),
    List(Vec<Value>),
    Dict(Vec<(Value, Value)>),
}

pub fn int(value: i64) -> Value {
    Value::Int(value)
}

pub fn text(text: &str) -> Value {
    Value::Text(text.to_owned())
}

pub fn list(values: &[Value]) -> Value {
    Value::List(values.to_vec())
}

pub fn dict(pairs: &[(&str, Value)]) -> Value {
    Value::Dict(pairs.iter().map(|(key, value)| (text(key), value.clone())).collect())
}

/// The pickle of `value`, lists appended to by the thousand.
pub fn pickle(value: &Value) -> Vec<u8> {
    pickle_in(value, 1000)
}

/// The pickle of `value`, lists appended to in batches.
pub fn pickle_in(value: &Value, batch: usize) -> Vec<u8> {
    let mut out = b"\x80\x04".to_vec();
    write(value, batch, &mut out);
    out.push(b'.');
    out
}

fn write(value: &Value, batch: usize, out: &mut Vec<u8>) {
    match value {
        Value::None => out.push(b'N'),
        Value::Bool(value) => out.push(if *value { 0x88 } else { 0x89 }),
        Value::Int(value) => match i32::try_from(*value) {
            Ok(value) => {
                out.push(b'J');
                out.extend(value.to_le_bytes());
            }
            Err(_) => {
                out.extend([0x8a, 8]);
                out.extend(value.to_le_bytes());
            }
        },
        Value::Text(text) => {
            out.extend([0x8c, text.len() as u8]);
            out.extend(text.as_bytes());
            out.push(0x94);
        }
        Value::Tuple(values) => {
            out.push(b'(');
            values.iter().for_each(|value| write(value, batch, out));
            out.extend(b"t\x94");
        }
        Value::List(values) => {
            out.extend(b"]\x94");
            for values in values.chunks(batch) {
                if let [value] = values {
                    write(value, batch, out);
                    out.push(b'a');
                } else {
                    out.push(b'(');
                    values.iter().for_each(|value| write(value, batch, out));
                    out.push(b'e');
                }
            }
        }
        Value::Dict(pairs) => {
            out.extend(b"}\x94");
            if !pairs.is_empty() {
                out.push(b'(');
                for (key, value) in pairs {
                    write(key, batch, out);
                    write(value, batch, out);
                }
                out.push(b'u');
            }
        }
    }
}
