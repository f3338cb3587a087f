//! What cuDNN's stand-in refuses, with its status and its text.
#![expect(unsafe_code, reason = "raw calls of cuDNN")]
#![expect(clippy::unwrap_used, reason = "a test")]

use crate::common::in_child;
use libloading::{Library, Symbol};
use std::ffi::{CStr, c_char, c_int, c_void};

type RawDescriptor = *mut c_void;

const BAD_PARAM: c_int = 2000;
const NOT_SUPPORTED: c_int = 3000;

/// Numbers of kinds: pointwise, graph, tensor, and the operation of a reduction.
const POINTWISE: c_int = 0;
const GRAPH: c_int = 15;
const TENSOR: c_int = 17;
const REDUCTION: c_int = 22;

struct Cudnn(Library);

impl Cudnn {
    fn open() -> Self {
        // SAFETY: the stand-in does nothing when it is loaded.
        Self(unsafe { Library::new("libcudnn.so.9") }.unwrap())
    }

    fn function<F>(&self, name: &str) -> Symbol<'_, F> {
        // SAFETY: the callers below give the types of the interface.
        unsafe { self.0.get(name) }.unwrap()
    }

    /// A status with the text of the last error, which is empty after a success.
    fn answer(&self, status: c_int) -> (c_int, String) {
        let last: Symbol<'_, unsafe extern "C" fn(*mut c_char, usize)> =
            self.function("cudnnGetLastErrorString");
        let mut text: [c_char; 256] = [0; 256];
        // SAFETY: room for so many bytes.
        unsafe { last(text.as_mut_ptr(), text.len()) };
        // SAFETY: the library has written a zero.
        let text = unsafe { CStr::from_ptr(text.as_ptr()) };
        (status, text.to_string_lossy().into_owned())
    }

    fn try_new(&self, kind: c_int) -> (c_int, RawDescriptor) {
        let create: Symbol<'_, unsafe extern "C" fn(c_int, *mut RawDescriptor) -> c_int> =
            self.function("cudnnBackendCreateDescriptor");
        let mut raw = std::ptr::null_mut();
        // SAFETY: a place for a pointer.
        (unsafe { create(kind, &raw mut raw) }, raw)
    }

    fn new_descriptor(&self, kind: c_int) -> RawDescriptor {
        let (status, raw) = self.try_new(kind);
        assert_eq!(status, 0);
        raw
    }

    /// Sets values that have the type `of`.
    fn set<T>(&self, raw: RawDescriptor, name: c_int, of: c_int, values: &[T]) -> (c_int, String) {
        let set: Symbol<
            '_,
            unsafe extern "C" fn(RawDescriptor, c_int, c_int, i64, *const c_void) -> c_int,
        > = self.function("cudnnBackendSetAttribute");
        // SAFETY: so many values are there.
        self.answer(unsafe { set(raw, name, of, values.len() as i64, values.as_ptr().cast()) })
    }

    fn finalize(&self, raw: RawDescriptor) -> (c_int, String) {
        let finalize: Symbol<'_, unsafe extern "C" fn(RawDescriptor) -> c_int> =
            self.function("cudnnBackendFinalize");
        // SAFETY: a descriptor, or a pointer that the library looks up.
        self.answer(unsafe { finalize(raw) })
    }
}

fn assert_refused(found: &(c_int, String), status: c_int, text: &str) {
    assert!(found.0 == status && found.1.contains(text), "{found:?}, not {status}: {text}");
}

/// Types of attributes.
const DATA_TYPE: c_int = 1;
const BOOLEAN: c_int = 2;
const INT64: c_int = 3;
const POINTWISE_MODE: c_int = 14;
const DESCRIPTOR: c_int = 15;

#[test]
fn cudnn_refuses_what_it_does_not_know() {
    in_child("cudnn::cudnn_refuses_what_it_does_not_know", &[], || {
        let cudnn = Cudnn::open();
        let kind = cudnn.answer(cudnn.try_new(10).0);
        assert_refused(&kind, NOT_SUPPORTED, "descriptors of kind 10");
        let how = cudnn.new_descriptor(POINTWISE);
        assert_refused(&cudnn.set(how, 7, INT64, &[1i64]), NOT_SUPPORTED, "attribute 7");
        assert_refused(&cudnn.set(how, 0, INT64, &[1i64]), BAD_PARAM, "has type 14, not 3");
        assert_refused(&cudnn.set(how, 0, POINTWISE_MODE, &[0i32; 2]), BAD_PARAM, "2 values");
        assert_refused(&cudnn.finalize(how), BAD_PARAM, "lacks attribute 1");
        assert_eq!(cudnn.set(how, 1, DATA_TYPE, &[0i32]), (0, String::new()));
        assert_eq!(cudnn.set(how, 0, POINTWISE_MODE, &[104i32]).0, 0);
        assert_refused(&cudnn.finalize(how), NOT_SUPPORTED, "pointwise mode 104");
        assert_eq!(cudnn.set(how, 0, POINTWISE_MODE, &[0i32]).0, 0);
        assert_eq!(cudnn.finalize(how).0, 0);
        assert_refused(&cudnn.finalize(how), BAD_PARAM, "is finalized");
        let nothing = std::ptr::null_mut();
        assert_refused(&cudnn.finalize(nothing), BAD_PARAM, "no live descriptor");
    });
}

/// A tensor of f32 of these sizes without gaps.
fn tensor(cudnn: &Cudnn, number: i64, sizes: [i64; 4]) -> RawDescriptor {
    let [_, b, c, d] = sizes;
    let raw = cudnn.new_descriptor(TENSOR);
    assert_eq!(cudnn.set(raw, 901, DATA_TYPE, &[0i32]).0, 0);
    assert_eq!(cudnn.set(raw, 902, INT64, &sizes).0, 0);
    assert_refused(&cudnn.finalize(raw), BAD_PARAM, "lacks attribute");
    assert_eq!(cudnn.set(raw, 903, INT64, &[b * c * d, c * d, d, 1]).0, 0);
    assert_eq!(cudnn.set(raw, 906, INT64, &[number]).0, 0);
    assert_eq!(cudnn.set(raw, 900, INT64, &[16i64]).0, 0);
    assert_eq!(cudnn.set(raw, 907, BOOLEAN, &[false]).0, 0);
    assert_eq!(cudnn.finalize(raw), (0, String::new()));
    raw
}

#[test]
fn cudnn_refuses_operations_of_tensors_that_do_not_fit() {
    in_child("cudnn::cudnn_refuses_operations_of_tensors_that_do_not_fit", &[], || {
        let cudnn = Cudnn::open();
        let how = cudnn.new_descriptor(21);
        assert_eq!(cudnn.set(how, 1600, 18, &[0i32]).0, 0);
        assert_eq!(cudnn.set(how, 1601, DATA_TYPE, &[0i32]).0, 0);
        assert_eq!(cudnn.finalize(how).0, 0);
        let x = tensor(&cudnn, 1, [1, 6, 4, 3]);
        let operation = |sizes: [i64; 4]| {
            let (raw, y) = (cudnn.new_descriptor(REDUCTION), tensor(&cudnn, 2, sizes));
            for (name, part) in [(1612, how), (1610, x), (1611, y)] {
                assert_eq!(cudnn.set(raw, name, DESCRIPTOR, &[part]).0, 0);
            }
            cudnn.finalize(raw)
        };
        assert_eq!(operation([1, 2, 4, 1]), (0, String::new()));
        assert_refused(&operation([1, 4, 4, 1]), BAD_PARAM, "gives no [1, 4, 4, 1]");
        let graph = cudnn.new_descriptor(GRAPH);
        assert_refused(&cudnn.finalize(graph), BAD_PARAM, "lacks attribute 800");
    });
}
