//! Where MiniJinja is not Python, and a chat template could tell: values as text, and filters, tests and methods put in
//! the place of its own. What it does not have at all is an error that names it, so that nothing is guessed.

use std::fmt::Write;

use minijinja::value::{from_args, Kwargs, Value, ValueKind};
use minijinja::{escape_formatter, Environment, Error, ErrorKind, State};
use minijinja_contrib::pycompat;

const MAX_INDENT: usize = 1000;

pub fn install(environment: &mut Environment<'static>) {
    environment.set_formatter(|output, state, value| match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => Ok(output.write_str(&repr(value)?)?),
        _ => escape_formatter(output, state, value),
    });
    environment.set_unknown_method_callback(method);
    environment.add_filter("indent", indent);
    environment.add_filter("int", int);
    environment.add_filter("length", length);
    environment.add_filter("count", length);
    environment.add_filter("replace", |text: String, old: &str, new: &str, count: Option<i64>| {
        replace(&text, old, new, count)
    });
    environment.add_filter("string", string);
    environment.add_filter("title", |text: String| title(&text, |c| is_space(c) || "-({[<".contains(c)));
    environment.add_filter("trim", |text: String, characters: Option<&str>| strip(&text, characters, BOTH).to_string());
    environment.add_test("iterable", iterable);
    environment.add_test("number", |value: &Value| matches!(value.kind(), ValueKind::Number | ValueKind::Bool));
    environment.add_test("sequence", |value: &Value| iterable(value) && !value.is_undefined());
}

fn iterable(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), Iterable | Map | Seq | String | Undefined)
}

fn string(value: &Value) -> Result<String, Error> {
    match value.kind() {
        ValueKind::Seq | ValueKind::Map | ValueKind::Iterable => repr(value),
        _ => Ok(value.to_string()),
    }
}

/// Python's repr, but for tuples, which are lists here.
fn repr(value: &Value) -> Result<String, Error> {
    let mut parts = Vec::new();
    match value.kind() {
        ValueKind::Map => {
            for key in value.try_iter()? {
                parts.push(format!("{}: {}", repr(&key)?, repr(&value.get_item(&key)?)?));
            }
            Ok(format!("{{{}}}", parts.join(", ")))
        }
        ValueKind::Seq | ValueKind::Iterable => {
            for item in value.try_iter()? {
                parts.push(repr(&item)?);
            }
            Ok(format!("[{}]", parts.join(", ")))
        }
        ValueKind::String => Ok(quoted(value.as_str().unwrap_or_default())),
        _ => Ok(value.to_string()),
    }
}

fn quoted(text: &str) -> String {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    let mut out = String::from(quote);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == quote => out.extend(['\\', c]),
            c if c.is_control() => write!(out, "\\x{:02x}", u32::from(c)).expect("a String takes everything"),
            c => out.push(c),
        }
    }
    out.push(quote);
    out
}

fn length(value: &Value) -> Result<usize, Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(0),
        kind => value.len().ok_or_else(|| {
            Error::new(ErrorKind::InvalidOperation, format!("cannot calculate length of value of type {kind}"))
        }),
    }
}

/// Lines end with \n afterwards; width is a number, or the text to put there.
fn indent(
    text: String, width: Option<Value>, first: Option<bool>, blank: Option<bool>, named: Kwargs,
) -> Result<String, Error> {
    let width = width.or(named.get("width")?).unwrap_or_else(|| 4.into());
    let first = first.or(named.get("first")?).unwrap_or(false);
    let blank = blank.or(named.get("blank")?).unwrap_or(false);
    named.assert_all_used()?;
    let indention = match width.as_str() {
        Some(indention) => indention.to_string(),
        None => " ".repeat(usize::try_from(width)?.min(MAX_INDENT)),
    };
    let mut out = String::new();
    for (number, line) in lines(&(text + "\n")).into_iter().enumerate() {
        if number > 0 {
            out.push('\n');
        }
        let wanted = if number == 0 { first } else { blank || !line.is_empty() };
        if wanted {
            out.push_str(&indention);
        }
        out.push_str(line);
    }
    Ok(out)
}

/// What is no number gives the default.
fn int(value: &Value, default: Option<i64>) -> i64 {
    let text = value.to_string();
    let text = strip(&text, None, BOTH);
    let whole = text.parse().ok().or_else(|| text.parse::<f64>().ok().map(|number| number as i64));
    let truth = (value.kind() == ValueKind::Bool).then(|| value.is_true().into());
    truth.or(whole).or(default).unwrap_or(0)
}

/// A capital after what ends a word, all else small. The filter and the method of this name differ in what that is.
fn title(text: &str, ends_word: impl Fn(char) -> bool) -> String {
    let mut at_start = true;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if at_start {
            out.extend(c.to_uppercase());
        } else {
            out.extend(c.to_lowercase());
        }
        at_start = ends_word(c);
    }
    out
}

fn replace(text: &str, old: &str, new: &str, count: Option<i64>) -> String {
    match count {
        Some(count) if count >= 0 => text.replacen(old, new, count as usize),
        _ => text.replace(old, new),
    }
}

/// What MiniJinja has no method for: first what pycompat lacks or does otherwise than Python, then pycompat.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return pycompat::unknown_method_callback(state, value, name, args);
    };
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let (characters,): (Option<&str>,) = from_args(args)?;
            let ends = Ends { start: name != "rstrip", end: name != "lstrip" };
            Ok(strip(text, characters, ends).into())
        }
        "split" if args.is_empty() => {
            Ok(text.split(is_space).filter(|word| !word.is_empty()).map(Value::from).collect())
        }
        "rsplit" => {
            let (separator, count): (&str, Option<usize>) = from_args(args)?;
            let mut parts: Vec<_> = text.rsplitn(count.map_or(usize::MAX, |n| n + 1), separator).collect();
            parts.reverse();
            Ok(parts.into_iter().map(Value::from).collect())
        }
        "splitlines" if args.is_empty() => Ok(lines(text).into_iter().map(Value::from).collect()),
        "title" => {
            let () = from_args(args)?;
            Ok(title(text, |c| !c.is_alphabetic()).into())
        }
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(text.strip_prefix(prefix).unwrap_or(text).into())
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(text.strip_suffix(suffix).unwrap_or(text).into())
        }
        _ => pycompat::unknown_method_callback(state, value, name, args),
    }
}

#[derive(Clone, Copy)]
struct Ends {
    start: bool,
    end: bool,
}

const BOTH: Ends = Ends { start: true, end: true };

fn strip<'a>(text: &'a str, characters: Option<&str>, ends: Ends) -> &'a str {
    let goes = |c: char| characters.map_or_else(|| is_space(c), |set| set.contains(c));
    let text = if ends.start { text.trim_start_matches(goes) } else { text };
    if ends.end { text.trim_end_matches(goes) } else { text }
}

/// Python's white space has four control characters more than Unicode's.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

/// Python ends lines at more places than at \n.
fn lines(text: &str) -> Vec<&str> {
    let ends = |c: char| matches!(c, '\n'..='\r' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut found = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        found.push(&rest[..at]);
        let end = &rest[at..];
        let width = if end.starts_with("\r\n") { 2 } else { end.chars().next().map_or(0, char::len_utf8) };
        rest = &end[width..];
    }
    if !rest.is_empty() {
        found.push(rest);
    }
    found
}
