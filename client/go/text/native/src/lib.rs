//! colibri_text.h, which says what is promised. This file has the C side of it; template.rs what templates see.

#![allow(clippy::missing_safety_doc)] // the header has it

mod json;
mod python;
mod template;

use std::panic::{catch_unwind, set_hook, AssertUnwindSafe};
use std::slice;
use std::str::FromStr;
use std::sync::Once;

use template::Template;
use tokenizers::Tokenizer;

type Failure = Box<dyn std::error::Error + Send + Sync>;
type Outcome<T> = Result<T, Failure>;

#[repr(C)]
pub struct Bytes {
    data: *mut u8,
    len: usize,
    capacity: usize,
}

impl Bytes {
    /// Memory that is aligned for ids, whatever it holds: the header promises it, and free needs to know it.
    fn of(content: &[u8]) -> Self {
        let mut words: Vec<u32> = vec![0; content.len().div_ceil(4)];
        let data = words.as_mut_ptr().cast::<u8>();
        let capacity = words.capacity();
        std::mem::forget(words);
        unsafe { data.copy_from_nonoverlapping(content.as_ptr(), content.len()) };
        Bytes { data, len: content.len(), capacity }
    }
}

/// Runs work with nothing escaping: gives its value, or writes what failed to out.
unsafe fn guarded<T>(out: *mut Bytes, work: impl FnOnce() -> Outcome<T>) -> Option<T> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| set_hook(Box::new(|_| ()))); // else a panic prints
    let message = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => return Some(value),
        Ok(Err(failure)) => failure.to_string(),
        Err(_) => "a panic in the text library".to_string(),
    };
    out.write(Bytes::of(message.as_bytes()));
    None
}

unsafe fn answer(out: *mut Bytes, work: impl FnOnce() -> Outcome<Vec<u8>>) -> i32 {
    match guarded(out, work) {
        Some(content) => {
            out.write(Bytes::of(&content));
            0
        }
        None => 1,
    }
}

unsafe fn object<T>(out: *mut Bytes, work: impl FnOnce() -> Outcome<T>) -> *mut T {
    match guarded(out, work) {
        Some(value) => {
            out.write(Bytes::of(b""));
            Box::into_raw(Box::new(value))
        }
        None => std::ptr::null_mut(),
    }
}

unsafe fn drop_object<T>(object: *mut T) {
    let _ = catch_unwind(AssertUnwindSafe(|| drop(Box::from_raw(object))));
}

/// The caller's memory; data may be anything, NULL too, if count is 0.
unsafe fn lent<'a, T>(data: *const T, count: usize) -> &'a [T] {
    if count == 0 {
        return &[];
    }
    slice::from_raw_parts(data, count)
}

unsafe fn text<'a>(data: *const u8, len: usize) -> Outcome<&'a str> {
    Ok(std::str::from_utf8(lent(data, len))?)
}

#[no_mangle]
pub unsafe extern "C" fn colibri_text_free(bytes: Bytes) {
    drop(Vec::from_raw_parts(bytes.data.cast::<u32>(), 0, bytes.capacity));
}

#[no_mangle]
pub unsafe extern "C" fn colibri_tokenizer_new(json: *const u8, len: usize, out: *mut Bytes) -> *mut Tokenizer {
    object(out, || Tokenizer::from_str(text(json, len)?))
}

#[no_mangle]
pub unsafe extern "C" fn colibri_tokenizer_drop(tokenizer: *mut Tokenizer) {
    drop_object(tokenizer);
}

#[no_mangle]
pub unsafe extern "C" fn colibri_tokenizer_encode(
    tokenizer: *const Tokenizer, input: *const u8, len: usize, add_special: i32, out: *mut Bytes,
) -> i32 {
    answer(out, || {
        let encoding = (*tokenizer).encode_fast(text(input, len)?, add_special != 0)?;
        Ok(encoding.get_ids().iter().flat_map(|id| id.to_ne_bytes()).collect())
    })
}

#[no_mangle]
pub unsafe extern "C" fn colibri_tokenizer_decode(
    tokenizer: *const Tokenizer, ids: *const u32, count: usize, out: *mut Bytes,
) -> i32 {
    answer(out, || Ok((*tokenizer).decode(lent(ids, count), true)?.into_bytes()))
}

#[no_mangle]
pub unsafe extern "C" fn colibri_tokenizer_token(tokenizer: *const Tokenizer, id: u32, out: *mut Bytes) -> i32 {
    answer(out, || (*tokenizer).id_to_token(id).map(String::into_bytes).ok_or_else(|| "".into()))
}

#[no_mangle]
pub unsafe extern "C" fn colibri_template_new(
    source: *const u8, len: usize, steps: u64, out: *mut Bytes,
) -> *mut Template {
    object(out, || Template::new(text(source, len)?, steps))
}

#[no_mangle]
pub unsafe extern "C" fn colibri_template_drop(template: *mut Template) {
    drop_object(template);
}

#[no_mangle]
pub unsafe extern "C" fn colibri_template_render(
    template: *const Template, variables: *const u8, len: usize, limit: usize, out: *mut Bytes,
) -> i32 {
    answer(out, || (*template).render(text(variables, len)?, limit))
}
