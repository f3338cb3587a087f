//! The kinds of cores that hwloc distinguishes, such as fast and efficient cores. hwloc has them
//! since 2.4: the functions are looked up in the loaded library. With an older library all cores
//! are of one kind.
#![expect(unsafe_code, reason = "calls functions of hwloc that an older library lacks")]

use std::ffi::{c_int, c_uint, c_ulong, c_void};
use std::ptr;

use hwloc2::CpuSet;
use libloading::os::unix::{Library, Symbol};

use crate::infos::{Info, infos};
use crate::raw::RawCpuKind;

type KindCount = unsafe extern "C" fn(*mut c_void, c_ulong) -> c_int;
type KindQuery = unsafe extern "C" fn(
    *mut c_void,
    c_uint,
    *mut c_void,
    *mut c_int,
    *mut c_uint,
    *mut *const Info,
    c_ulong,
) -> c_int;

/// The kinds of a topology, in hwloc's order; empty if hwloc reports none.
///
/// # Safety
/// `topology` is a loaded topology that lives during this call.
pub(crate) unsafe fn of(topology: *mut c_void) -> Vec<RawCpuKind> {
    let library = Library::this();
    // SAFETY: hwloc/cpukinds.h declares it so in each 2.x that has it.
    let count = unsafe { library.get::<KindCount>(b"hwloc_cpukinds_get_nr\0") };
    // SAFETY: as above.
    let query = unsafe { library.get::<KindQuery>(b"hwloc_cpukinds_get_info\0") };
    let (Ok(count), Ok(query)) = (count, query) else { return Vec::new() };
    // SAFETY: the caller's topology is loaded.
    let count = unsafe { count(topology, 0) };
    let kinds = (0..c_uint::try_from(count).unwrap_or(0)).filter_map(|kind| {
        // SAFETY: as above.
        unsafe { kind_of(topology, kind, &query) }
    });
    kinds.collect()
}

/// # Safety
/// As [`of`].
unsafe fn kind_of(
    topology: *mut c_void,
    kind: c_uint,
    query: &Symbol<KindQuery>,
) -> Option<RawCpuKind> {
    let set = CpuSet::new();
    let (mut efficiency, mut count, mut at) = (-1, 0, ptr::null());
    let to = set.as_ptr().cast_mut().cast();
    // SAFETY: the set is owned here, and there is a place for each of the three answers.
    let result =
        unsafe { query(topology, kind, to, &raw mut efficiency, &raw mut count, &raw mut at, 0) };
    if result != 0 {
        return None;
    }
    // SAFETY: hwloc keeps `count` entries there as long as the topology.
    let infos = unsafe { infos(at, count) };
    Some(RawCpuKind { cpus: set.into_iter().collect(), efficiency, infos })
}
