//! Chat templates as Hugging Face's renderer (Python's jinja2 in a sandbox) runs them, in MiniJinja, which has no way
//! out to files or the system. A template sees its variables, the built-in filters and tests, Python's methods of
//! strings, lists and dictionaries, raise_exception and strftime_now.

use std::io::{self, Write};
use std::thread;

use minijinja::syntax::SyntaxConfig;
use minijinja::{AutoEscape, Environment, Error, ErrorKind, Value};

use crate::{json, python, Outcome};

const NAME: &str = "chat";
const RECURSION: usize = 100; // macros that call macros
const STACK: usize = 256 << 20; // bytes, of which what is used is taken: 1 KiB for each nesting that the steps allow
const REFUSAL: &str = "raise_exception"; // how an error made by the template itself is known again

pub struct Template(Environment<'static>);

impl Template {
    pub fn new(source: &str, steps: u64) -> Outcome<Self> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_recursion_limit(RECURSION);
        environment.set_fuel(Some(steps));
        python::install(&mut environment);
        environment.add_filter("tojson", json::tojson);
        environment.add_function("raise_exception", raise_exception);
        environment.add_function("strftime_now", strftime_now);
        environment.add_template_owned(NAME, source.to_string()).map_err(|e| explained(&e))?;
        Ok(Template(environment))
    }

    /// On a stack of its own: a template can nest lists as deep as its steps allow, and Rust takes them apart by
    /// recursion.
    pub fn render(&self, variables: &str, limit: usize) -> Outcome<Vec<u8>> {
        thread::scope(|scope| {
            let own = thread::Builder::new().stack_size(STACK).spawn_scoped(scope, || self.run(variables, limit))?;
            own.join().unwrap_or_else(|_| Err("a panic in the template engine".into()))
        })
    }

    fn run(&self, variables: &str, limit: usize) -> Outcome<Vec<u8>> {
        let variables: Value = serde_json::from_str(variables)?;
        let mut output = Bounded { text: Vec::new(), limit };
        self.0.get_template(NAME)?.render_captured_to(variables, &mut output).map_err(|e| explained(&e))?;
        Ok(output.text)
    }
}

/// What an error says to the person who sent the messages.
fn explained(error: &Error) -> String {
    let detail = error.detail().unwrap_or_default();
    if let Some(message) = detail.strip_prefix(REFUSAL) {
        return message.to_string();
    }
    let cause = std::error::Error::source(error).map(|cause| format!(": {cause}")).unwrap_or_default();
    let line = error.line().map(|line| format!(" (line {line} of the template)")).unwrap_or_default();
    match error.kind() {
        ErrorKind::OutOfFuel => format!("it takes too many steps{line}"),
        kind if detail.is_empty() => format!("{kind}{cause}{line}"),
        kind => format!("{kind}: {detail}{cause}{line}"),
    }
}

fn raise_exception(message: String) -> Result<Value, Error> {
    Err(Error::new(ErrorKind::InvalidOperation, format!("{REFUSAL}{message}")))
}

/// The local time by the C library, which is what Python's strftime does.
fn strftime_now(format: String) -> Result<String, Error> {
    let refused = || Error::new(ErrorKind::InvalidOperation, format!("strftime_now cannot use {format:?}"));
    if format.is_empty() {
        return Ok(String::new());
    }
    let c_format = std::ffi::CString::new(format.as_str()).map_err(|_| refused())?;
    let mut buffer = [0u8; 256];
    let written = unsafe {
        let now = libc::time(std::ptr::null_mut());
        let mut fields: libc::tm = std::mem::zeroed();
        libc::localtime_r(&now, &mut fields);
        libc::strftime(buffer.as_mut_ptr().cast(), buffer.len(), c_format.as_ptr(), &fields)
    };
    if written == 0 {
        return Err(refused());
    }
    Ok(String::from_utf8_lossy(&buffer[..written]).into_owned())
}

struct Bounded {
    text: Vec<u8>,
    limit: usize,
}

impl Write for Bounded {
    fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
        if piece.len() > self.limit - self.text.len() {
            return Err(io::Error::other(format!("more than {} bytes", self.limit)));
        }
        self.text.extend_from_slice(piece);
        Ok(piece.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
