//! Attributes of descriptors: the type and the count of values that each one takes, and values as
//! the caller has them in memory.
#![expect(unsafe_code, reason = "reads and writes the caller's values")]

use std::ffi::{c_int, c_void};

use super::{Answer, bad, demand, unsupported};

/// Numbers of `cudnnBackendDescriptorType_t`.
pub(super) mod kind {
    use std::ffi::c_int;

    pub(crate) const POINTWISE: c_int = 0;
    pub(crate) const ENGINE: c_int = 2;
    pub(crate) const ENGINE_CONFIG: c_int = 3;
    pub(crate) const HEURISTIC: c_int = 4;
    pub(crate) const PLAN: c_int = 5;
    pub(crate) const OPERATION_POINTWISE: c_int = 13;
    pub(crate) const GRAPH: c_int = 15;
    pub(crate) const VARIANT_PACK: c_int = 16;
    pub(crate) const TENSOR: c_int = 17;
    pub(crate) const MATMUL: c_int = 18;
    pub(crate) const OPERATION_MATMUL: c_int = 19;
    pub(crate) const REDUCTION: c_int = 21;
    pub(crate) const OPERATION_REDUCTION: c_int = 22;
    pub(crate) const OPERATION_RESHAPE: c_int = 31;
}

/// Numbers of `cudnnBackendAttributeName_t`.
pub(super) mod name {
    use std::ffi::c_int;

    pub(crate) const POINTWISE_MODE: c_int = 0;
    pub(crate) const POINTWISE_PRECISION: c_int = 1;
    pub(crate) const POINTWISE_AXIS: c_int = 9;
    pub(crate) const HEURISTIC_MODE: c_int = 200;
    pub(crate) const HEURISTIC_GRAPH: c_int = 201;
    pub(crate) const HEURISTIC_RESULTS: c_int = 202;
    pub(crate) const CONFIG_ENGINE: c_int = 300;
    pub(crate) const PLAN_HANDLE: c_int = 400;
    pub(crate) const PLAN_CONFIG: c_int = 401;
    pub(crate) const PLAN_WORKSPACE: c_int = 402;
    pub(crate) const POINTWISE_HOW: c_int = 750;
    pub(crate) const POINTWISE_X: c_int = 751;
    pub(crate) const POINTWISE_B: c_int = 752;
    pub(crate) const POINTWISE_Y: c_int = 753;
    pub(crate) const POINTWISE_T: c_int = 758;
    pub(crate) const GRAPH_HANDLE: c_int = 800;
    pub(crate) const GRAPH_OPERATIONS: c_int = 801;
    pub(crate) const TENSOR_ALIGNMENT: c_int = 900;
    pub(crate) const TENSOR_TYPE: c_int = 901;
    pub(crate) const TENSOR_SIZES: c_int = 902;
    pub(crate) const TENSOR_STRIDES: c_int = 903;
    pub(crate) const TENSOR_NUMBER: c_int = 906;
    pub(crate) const TENSOR_IS_VIRTUAL: c_int = 907;
    pub(crate) const TENSOR_IS_VALUE: c_int = 908;
    pub(crate) const PACK_NUMBERS: c_int = 1000;
    pub(crate) const PACK_ADDRESSES: c_int = 1001;
    pub(crate) const PACK_WORKSPACE: c_int = 1003;
    pub(crate) const ENGINE_NOTES: c_int = 1303;
    pub(crate) const MATMUL_PRECISION: c_int = 1500;
    pub(crate) const MATMUL_A: c_int = 1520;
    pub(crate) const MATMUL_B: c_int = 1521;
    pub(crate) const MATMUL_C: c_int = 1522;
    pub(crate) const MATMUL_HOW: c_int = 1523;
    pub(crate) const REDUCTION_OPERATOR: c_int = 1600;
    pub(crate) const REDUCTION_PRECISION: c_int = 1601;
    pub(crate) const REDUCTION_X: c_int = 1610;
    pub(crate) const REDUCTION_Y: c_int = 1611;
    pub(crate) const REDUCTION_HOW: c_int = 1612;
    pub(crate) const RESHAPE_X: c_int = 2200;
    pub(crate) const RESHAPE_Y: c_int = 2201;
}

/// Numbers of `cudnnBackendAttributeType_t`.
pub(super) mod of {
    use std::ffi::c_int;

    pub(crate) const HANDLE: c_int = 0;
    pub(crate) const DATA_TYPE: c_int = 1;
    pub(crate) const BOOLEAN: c_int = 2;
    pub(crate) const INT64: c_int = 3;
    pub(crate) const POINTER: c_int = 6;
    pub(crate) const HEURISTIC_MODE: c_int = 8;
    pub(crate) const NUMERICAL_NOTE: c_int = 11;
    pub(crate) const POINTWISE_MODE: c_int = 14;
    pub(crate) const DESCRIPTOR: c_int = 15;
    pub(crate) const REDUCTION_OPERATOR: c_int = 18;
}

/// Bytes of a value of a type.
fn bytes(of: c_int) -> Answer<usize> {
    Ok(match of {
        of::HANDLE | of::INT64 | of::POINTER | of::DESCRIPTOR => 8,
        of::BOOLEAN => 1,
        of::DATA_TYPE
        | of::HEURISTIC_MODE
        | of::NUMERICAL_NOTE
        | of::POINTWISE_MODE
        | of::REDUCTION_OPERATOR => 4,
        _ => return unsupported(format!("values of type {of}")),
    })
}

/// Most values of an attribute that may have several.
const MANY: usize = 1 << 16;

/// The type of an attribute that a caller sets on a kind of descriptor, and its most values.
pub(super) fn rule(kind: c_int, name: c_int) -> Option<(c_int, usize)> {
    Some(match (kind, name) {
        (kind::POINTWISE, name::POINTWISE_MODE) => (of::POINTWISE_MODE, 1),
        (kind::POINTWISE, name::POINTWISE_PRECISION)
        | (kind::MATMUL, name::MATMUL_PRECISION)
        | (kind::REDUCTION, name::REDUCTION_PRECISION)
        | (kind::TENSOR, name::TENSOR_TYPE) => (of::DATA_TYPE, 1),
        (kind::REDUCTION, name::REDUCTION_OPERATOR) => (of::REDUCTION_OPERATOR, 1),
        (kind::POINTWISE, name::POINTWISE_AXIS)
        | (kind::TENSOR, name::TENSOR_NUMBER | name::TENSOR_ALIGNMENT) => (of::INT64, 1),
        (kind::TENSOR, name::TENSOR_SIZES | name::TENSOR_STRIDES) => (of::INT64, 8),
        (kind::TENSOR, name::TENSOR_IS_VIRTUAL | name::TENSOR_IS_VALUE) => (of::BOOLEAN, 1),
        (kind::GRAPH, name::GRAPH_OPERATIONS) => (of::DESCRIPTOR, MANY),
        (kind::GRAPH, name::GRAPH_HANDLE) | (kind::PLAN, name::PLAN_HANDLE) => (of::HANDLE, 1),
        (kind::HEURISTIC, name::HEURISTIC_MODE) => (of::HEURISTIC_MODE, 1),
        (kind::HEURISTIC, name::HEURISTIC_GRAPH)
        | (kind::PLAN, name::PLAN_CONFIG)
        | (
            kind::OPERATION_POINTWISE,
            name::POINTWISE_HOW
            | name::POINTWISE_X
            | name::POINTWISE_B
            | name::POINTWISE_T
            | name::POINTWISE_Y,
        )
        | (
            kind::OPERATION_MATMUL,
            name::MATMUL_HOW | name::MATMUL_A | name::MATMUL_B | name::MATMUL_C,
        )
        | (
            kind::OPERATION_REDUCTION,
            name::REDUCTION_HOW | name::REDUCTION_X | name::REDUCTION_Y,
        )
        | (kind::OPERATION_RESHAPE, name::RESHAPE_X | name::RESHAPE_Y) => (of::DESCRIPTOR, 1),
        (kind::VARIANT_PACK, name::PACK_NUMBERS) => (of::INT64, MANY),
        (kind::VARIANT_PACK, name::PACK_ADDRESSES) => (of::POINTER, MANY),
        (kind::VARIANT_PACK, name::PACK_WORKSPACE) => (of::POINTER, 1),
        _ => return None,
    })
}

/// Values of an attribute, each widened to 64 bits.
#[derive(Debug, Clone)]
pub(super) struct Values {
    pub(super) of: c_int,
    pub(super) all: Vec<u64>,
}

impl Values {
    /// Reads `count` values of the type `of`.
    pub(super) fn read(of: c_int, count: i64, values: *const c_void) -> Answer<Self> {
        let size = bytes(of)?;
        let count = usize::try_from(count).ok().filter(|count| (1..=MANY).contains(count));
        let Some(count) = count else { return bad("an attribute without values") };
        demand(!values.is_null(), || "no values are given".into())?;
        let read = |i: usize| {
            let mut bits = [0u8; 8];
            // SAFETY: the caller has `count` values of `size` bytes there, by the C interface.
            let from =
                unsafe { std::slice::from_raw_parts(values.cast::<u8>().add(i * size), size) };
            bits[..size].copy_from_slice(from);
            u64::from_le_bytes(bits)
        };
        Ok(Self { of, all: (0..count).map(read).collect() })
    }

    /// Writes the values, as far as the caller has room; returns their number.
    pub(super) fn write(&self, room: usize, values: *mut c_void) -> Answer<usize> {
        let size = bytes(self.of)?;
        let written = self.all.len().min(room);
        for (i, number) in self.all[..written].iter().enumerate() {
            let bits = number.to_le_bytes();
            // SAFETY: the caller has room for `room` values of `size` bytes.
            unsafe {
                let to = values.cast::<u8>().add(i * size);
                to.copy_from_nonoverlapping(bits.as_ptr(), size);
            }
        }
        Ok(written)
    }
}
