//! The tojson that chat templates get: Python's json.dumps without Jinja's escapes for HTML, which models were not
//! trained on.

use std::io;

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};
use serde_json::Serializer;

pub fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    if value.is_undefined() {
        return Err(Error::new(ErrorKind::BadSerialization, "an undefined value is not JSON"));
    }
    let indent: Option<usize> = options.get("indent")?;
    let separators: Option<Vec<String>> = options.get("separators")?;
    let ascii: Option<bool> = options.get("ensure_ascii")?;
    let sorted: Option<bool> = options.get("sort_keys")?;
    options.assert_all_used()?;
    if separators.as_ref().is_some_and(|pair| pair.len() != 2 || indent.is_some()) {
        return Err(Error::new(ErrorKind::InvalidOperation, "separators are two texts, and not together with indent"));
    }
    let pair = separators.unwrap_or_else(|| vec![", ".into(), ": ".into()]);
    let spaces = " ".repeat(indent.unwrap_or(0));
    let text = write(value, sorted == Some(true), indent.map(|_| spaces.as_str()), &pair)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    Ok(if ascii == Some(true) { escaped(&text) } else { text })
}

fn write(value: &Value, sorted: bool, indent: Option<&str>, pair: &[String]) -> serde_json::Result<String> {
    let mut json = serde_json::to_value(value)?;
    if sorted {
        json.sort_all_objects();
    }
    let mut out = Vec::new();
    match indent {
        Some(spaces) => {
            let style = PrettyFormatter::with_indent(spaces.as_bytes());
            json.serialize(&mut Serializer::with_formatter(&mut out, style))?;
        }
        None => {
            let style = OneLine { comma: &pair[0], colon: &pair[1] };
            json.serialize(&mut Serializer::with_formatter(&mut out, style))?;
        }
    }
    Ok(String::from_utf8(out).expect("JSON is UTF-8"))
}

/// Only strings have characters beyond ASCII.
fn escaped(json: &str) -> String {
    let mut units = [0u16; 2];
    json.chars()
        .map(|c| match c {
            '\0'..='\x7f' => c.to_string(),
            _ => c.encode_utf16(&mut units).iter().map(|unit| format!("\\u{unit:04x}")).collect(),
        })
        .collect()
}

struct OneLine<'a> {
    comma: &'a str,
    colon: &'a str,
}

impl OneLine<'_> {
    fn between<W: ?Sized + io::Write>(&self, out: &mut W, first: bool) -> io::Result<()> {
        if first {
            return Ok(());
        }
        out.write_all(self.comma.as_bytes())
    }
}

impl Formatter for OneLine<'_> {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.between(out, first)
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.between(out, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(self.colon.as_bytes())
    }
}
