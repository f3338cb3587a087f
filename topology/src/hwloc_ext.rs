//! The functions and structures of hwloc that `hwloc2` 2.2.0 lacks or declares wrongly, and nothing
//! else.
//!
//! `hwloc2` cannot load XML or synthetic boxes, keeps no I/O objects, panics when it lists NUMA
//! nodes (Ichbinjoe/hwloc2-rs#3), cannot bind memory, and hides its own handle. This file therefore
//! has its own handle and a dozen externs. It returns plain data ([`RawBox`]) from one walk and
//! never a pointer. A library of another major version lays out these structures differently and is
//! refused before any of them is read.
#![expect(
    unsafe_code,
    reason = "declares the C functions and structures of hwloc that hwloc2 lacks"
)]

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_float, c_int, c_uint, c_ulong, c_void};
use std::io;
use std::ptr::{self, NonNull};

use hwloc2::NodeSet;

use crate::infos::{Info, infos, text};
use crate::raw::{RawBox, RawDistances, RawKind, RawObject, RawPci};
use crate::{Error, PciAddress, cpu_kinds};

/// Largest CPU or node number of a set, which may be infinite.
const MOST_IN_A_SET: c_int = 16 * 1024;

const UNKNOWN_INDEX: c_uint = c_uint::MAX;
const INCLUDE_DISALLOWED: c_ulong = 1;
const KEEP_ALL: c_int = 0;
const POLICY_BIND: c_int = 2;
const STRICT: c_int = 1 << 2;
const BYNODESET: c_int = 1 << 5;
const DEPTH_ROOT: c_int = 0;

/// `struct hwloc_obj` of hwloc 2.x, field by field.
#[repr(C)]
struct Obj {
    kind: c_int,
    subtype: *const c_char,
    os_index: c_uint,
    name: *const c_char,
    total_memory: u64,
    attr: *const Attr,
    depth: c_int,
    logical_index: c_uint,
    next_cousin: *const Self,
    prev_cousin: *const Self,
    parent: *const Self,
    sibling_rank: c_uint,
    next_sibling: *const Self,
    prev_sibling: *const Self,
    arity: c_uint,
    children: *const *const Self,
    first_child: *const Self,
    last_child: *const Self,
    symmetric_subtree: c_int,
    memory_arity: c_uint,
    memory_first_child: *const Self,
    io_arity: c_uint,
    io_first_child: *const Self,
    misc_arity: c_uint,
    misc_first_child: *const Self,
    cpuset: *const c_void,
    complete_cpuset: *const c_void,
    nodeset: *const c_void,
    complete_nodeset: *const c_void,
    infos: *const Info,
    infos_count: c_uint,
    userdata: *const c_void,
    gp_index: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct PciAttr {
    domain: u16,
    bus: u8,
    dev: u8,
    func: u8,
    class_id: u16,
    vendor_id: u16,
    device_id: u16,
    subvendor_id: u16,
    subdevice_id: u16,
    revision: u8,
    linkspeed: c_float,
}

#[repr(C)]
#[derive(Clone, Copy)]
struct BridgeAttr {
    upstream: PciAttr,
    upstream_type: c_int,
    downstream_domain: u16,
    secondary_bus: u8,
    subordinate_bus: u8,
    downstream_type: c_int,
    depth: c_uint,
}

#[repr(C)]
union Attr {
    local_memory: u64,
    pci: PciAttr,
    bridge: BridgeAttr,
}

#[repr(C)]
struct Distances {
    nbobjs: c_uint,
    objs: *const *const Obj,
    kind: c_ulong,
    values: *const u64,
}

// The sizes of hwloc 2.9's structures on 64-bit Linux; `hwloc2` asserts the object's size too.
const _: () = assert!(size_of::<Obj>() == 248);
const _: () = assert!(size_of::<Obj>() == size_of::<hwloc2::TopologyObject>());
const _: () = assert!(size_of::<PciAttr>() == 24);
const _: () = assert!(size_of::<BridgeAttr>() == 40);
const _: () = assert!(size_of::<Distances>() == 32);

/// hwloc's opaque topology.
#[repr(C)]
struct OpaqueTopology {
    _private: [u8; 0],
}

// SAFETY: these are the declarations of hwloc.h and hwloc/distances.h 2.x with C's types; `hwloc_topology_t` and the
// bitmaps are opaque pointers. hwloc2 links the library.
unsafe extern "C" {
    safe fn hwloc_get_api_version() -> c_uint;
    fn hwloc_topology_init(topology: *mut *mut OpaqueTopology) -> c_int;
    fn hwloc_topology_destroy(topology: *mut OpaqueTopology);
    fn hwloc_topology_set_flags(topology: *mut OpaqueTopology, flags: c_ulong) -> c_int;
    fn hwloc_topology_set_io_types_filter(topology: *mut OpaqueTopology, filter: c_int) -> c_int;
    fn hwloc_topology_set_xmlbuffer(
        t: *mut OpaqueTopology,
        buffer: *const c_char,
        size: c_int,
    ) -> c_int;
    fn hwloc_topology_set_synthetic(t: *mut OpaqueTopology, description: *const c_char) -> c_int;
    fn hwloc_topology_load(topology: *mut OpaqueTopology) -> c_int;
    fn hwloc_topology_is_thissystem(topology: *mut OpaqueTopology) -> c_int;
    fn hwloc_get_obj_by_depth(
        topology: *mut OpaqueTopology,
        depth: c_int,
        index: c_uint,
    ) -> *const Obj;
    fn hwloc_topology_get_allowed_cpuset(topology: *mut OpaqueTopology) -> *const c_void;
    fn hwloc_topology_get_allowed_nodeset(topology: *mut OpaqueTopology) -> *const c_void;
    fn hwloc_bitmap_next(set: *const c_void, previous: c_int) -> c_int;
    fn hwloc_distances_get_by_name(
        topology: *mut OpaqueTopology,
        name: *const c_char,
        count: *mut c_uint,
        found: *mut *mut Distances,
        flags: c_ulong,
    ) -> c_int;
    fn hwloc_distances_release(topology: *mut OpaqueTopology, distances: *mut Distances);
    fn hwloc_set_area_membind(
        topology: *mut OpaqueTopology,
        start: *const c_void,
        bytes: usize,
        nodes: *const c_void,
        policy: c_int,
        flags: c_int,
    ) -> c_int;
    fn hwloc_get_area_memlocation(
        topology: *mut OpaqueTopology,
        start: *const c_void,
        bytes: usize,
        nodes: *mut c_void,
        flags: c_int,
    ) -> c_int;
}

/// The source of a topology.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Input<'a> {
    /// The machine on which this process runs.
    Live,
    /// The text of an XML export, checked by `guard`.
    Xml(&'a CStr),
    /// hwloc's synthetic description, such as `pack:2 numa:1 core:8 pu:2`.
    Synthetic(&'a CStr),
}

/// A loaded topology.
pub(crate) struct Handle(NonNull<OpaqueTopology>);

// SAFETY: a loaded topology does not change; hwloc documents concurrent reading and binding as
// safe, and this file offers nothing else.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

impl Handle {
    /// Loads a topology, in milliseconds for a file, more for a large live box.
    pub(crate) fn load(input: Input<'_>) -> Result<Self, Error> {
        check_library()?;
        let mut raw = ptr::null_mut();
        // SAFETY: `raw` is a place for one pointer, which the call fills on success.
        let initialised = unsafe { hwloc_topology_init(&raw mut raw) } == 0;
        let handle = NonNull::new(raw).filter(|_| initialised).map(Self);
        let handle = handle.ok_or_else(|| Error::HwlocLoad { why: last_error() })?;
        let t = handle.0.as_ptr();
        let must = |result: c_int| {
            if result == 0 { Ok(()) } else { Err(Error::HwlocLoad { why: last_error() }) }
        };
        // SAFETY: `t` is initialised and not yet loaded, here and in the calls below.
        must(unsafe { hwloc_topology_set_flags(t, INCLUDE_DISALLOWED) })?;
        // SAFETY: as above.
        must(unsafe { hwloc_topology_set_io_types_filter(t, KEEP_ALL) })?;
        match input {
            Input::Live => {}
            Input::Xml(text) => {
                let size = text.to_bytes_with_nul().len();
                let size = c_int::try_from(size)
                    .map_err(|_| Error::NotABox { why: "the text is longer than 2 GiB".into() })?;
                // SAFETY: the text is NUL-terminated, `size` counts the NUL, and hwloc copies what it keeps.
                must(unsafe { hwloc_topology_set_xmlbuffer(t, text.as_ptr(), size) })?;
            }
            // SAFETY: the description is NUL-terminated and parsed before the call returns.
            Input::Synthetic(s) => must(unsafe { hwloc_topology_set_synthetic(t, s.as_ptr()) })?,
        }
        // SAFETY: as above; nothing was loaded before.
        must(unsafe { hwloc_topology_load(t) })?;
        Ok(handle)
    }

    /// Whether the topology describes the machine on which this process runs. Binding through the
    /// topology of another box would do nothing and report success.
    pub(crate) fn is_this_machine(&self) -> bool {
        // SAFETY: the topology is loaded.
        (unsafe { hwloc_topology_is_thissystem(self.0.as_ptr()) }) == 1
    }

    /// Binds pages that do not exist yet to `nodes`, all of them and no others. An area whose ends
    /// are inside a page also binds the rest of that page.
    pub(crate) fn bind_area(&self, start: *mut u8, bytes: usize, nodes: &[u32]) -> io::Result<()> {
        let set: NodeSet = nodes.iter().copied().collect();
        let (t, flags) = (self.0.as_ptr(), STRICT | BYNODESET);
        // SAFETY: the call reads the set and tells the kernel about the range of addresses; it touches no byte there.
        let result = unsafe {
            hwloc_set_area_membind(t, start.cast(), bytes, set.as_ptr().cast(), POLICY_BIND, flags)
        };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    }

    /// The nodes on which the pages of the area are now. Untouched pages are on no node. hwloc's
    /// arithmetic wraps at 4 GiB: callers pass less than that at a time.
    pub(crate) fn location_of(&self, start: *const u8, bytes: usize) -> io::Result<Vec<u32>> {
        let set = NodeSet::new();
        let t = self.0.as_ptr();
        // SAFETY: the set is owned here and valid; the kernel is asked about addresses, no byte is touched.
        let result = unsafe {
            hwloc_get_area_memlocation(
                t,
                start.cast(),
                bytes,
                set.as_ptr().cast_mut().cast(),
                BYNODESET,
            )
        };
        if result != 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(set.into_iter().collect())
    }

    /// The whole box as plain data.
    pub(crate) fn read(&self) -> RawBox {
        let t = self.0.as_ptr();
        // SAFETY: the topology is loaded; the sets live as long as it.
        let allowed_cpus = members(unsafe { hwloc_topology_get_allowed_cpuset(t) });
        // SAFETY: as above.
        let allowed_nodes = members(unsafe { hwloc_topology_get_allowed_nodeset(t) });
        let mut objects = Vec::new();
        let mut index_of = HashMap::new();
        // SAFETY: depth 0 holds the root, for which NULL is a possible answer.
        let root = unsafe { hwloc_get_obj_by_depth(t, DEPTH_ROOT, 0) };
        let mut open = vec![(root, None)];
        while let Some((at, parent)) = open.pop() {
            let Some(object) = self.object(at) else { continue };
            let index = objects.len();
            index_of.insert(at, index);
            objects.push(self.raw(object, parent));
            // Reversed, so that the walk keeps hwloc's order: memory, then CPUs, then I/O.
            let children = [object.io_first_child, object.first_child, object.memory_first_child];
            for first in children {
                let children = self.siblings(first);
                open.extend(children.into_iter().rev().map(|child| (child, Some(index))));
            }
        }
        let numa_distances = self.distances(c"NUMALatency", &index_of);
        let nvlink = self.distances(c"NVLinkBandwidth", &index_of);
        // SAFETY: the topology is loaded.
        let cpu_kinds = unsafe { cpu_kinds::of(t.cast()) };
        RawBox { objects, allowed_cpus, allowed_nodes, numa_distances, nvlink, cpu_kinds }
    }

    fn object(&self, at: *const Obj) -> Option<&Obj> {
        // SAFETY: every pointer here comes from hwloc's own links within this topology. It is NULL
        // or valid until the topology is destroyed, and nothing changes a loaded topology.
        unsafe { at.as_ref() }
    }

    fn siblings(&self, first: *const Obj) -> Vec<*const Obj> {
        let next = |at: &*const Obj| self.object(*at).map(|object| object.next_sibling);
        std::iter::successors(Some(first), next).filter(|at| !at.is_null()).collect()
    }

    fn raw(&self, object: &Obj, parent: Option<usize>) -> RawObject {
        let kind = kind_of(object);
        let pci = match kind {
            // SAFETY: hwloc gives objects of this type the PCI part of the union.
            RawKind::PciDevice => attr(object).map(|attr| unsafe { attr.pci }),
            // SAFETY: hwloc gives bridges the bridge part; its upstream is a PCI device for this kind.
            RawKind::PciBridge => attr(object).map(|attr| unsafe { attr.bridge }.upstream),
            _ => None,
        };
        let memory = match kind {
            // SAFETY: hwloc gives NUMA nodes the memory part of the union.
            RawKind::NumaNode => attr(object).map_or(0, |attr| unsafe { attr.local_memory }),
            _ => 0,
        };
        // SAFETY: hwloc keeps `infos_count` entries at `infos`.
        let infos = unsafe { infos(object.infos, object.infos_count) };
        RawObject {
            kind,
            parent,
            os_index: (object.os_index != UNKNOWN_INDEX).then_some(object.os_index),
            cpus: members(object.cpuset),
            nodes: members(object.nodeset),
            memory,
            name: text(object.name),
            infos,
            pci: pci.map(|pci| RawPci {
                address: PciAddress {
                    domain: pci.domain.into(),
                    bus: pci.bus,
                    device: pci.dev,
                    function: pci.func,
                },
                class: pci.class_id,
                vendor_id: pci.vendor_id,
                device_id: pci.device_id,
                gb_per_s: pci.linkspeed,
            }),
        }
    }

    /// A named matrix between objects; `None` if the box has no such matrix.
    fn distances(
        &self,
        name: &CStr,
        index_of: &HashMap<*const Obj, usize>,
    ) -> Option<RawDistances> {
        let (t, mut count, mut found) = (self.0.as_ptr(), 1, ptr::null_mut());
        // SAFETY: `found` has room for the one pointer that `count` announces.
        let result = unsafe {
            hwloc_distances_get_by_name(t, name.as_ptr(), &raw mut count, &raw mut found, 0)
        };
        // SAFETY: with a result of 0 and a count above 0 the pointer is valid until released below.
        let distances = unsafe { found.as_ref() }.filter(|_| result == 0 && count > 0)?;
        let n = distances.nbobjs as usize;
        // SAFETY: hwloc keeps `nbobjs` object pointers there.
        let objects = unsafe { std::slice::from_raw_parts(distances.objs, n) };
        let objects = objects.iter().map(|at| index_of.get(at).copied()).collect();
        // SAFETY: hwloc keeps a square of values there.
        let values = unsafe { std::slice::from_raw_parts(distances.values, n * n) }.to_vec();
        // SAFETY: the call above returned it, and there is no later use.
        unsafe { hwloc_distances_release(t, found) };
        Some(RawDistances { objects, values })
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: initialised in `load` and owned here alone.
        unsafe { hwloc_topology_destroy(self.0.as_ptr()) };
    }
}

/// Refuses a library whose structures differ from those above.
pub(crate) fn check_library() -> Result<(), Error> {
    check_version(hwloc_get_api_version())
}

/// hwloc 3 moves fields of the structures above.
fn check_version(found: u32) -> Result<(), Error> {
    if found >> 16 == 2 { Ok(()) } else { Err(Error::HwlocVersion { found }) }
}

/// A C string for hwloc. Text with a NUL inside describes no box.
pub(crate) fn c_text(text: impl Into<Vec<u8>>) -> Result<CString, Error> {
    CString::new(text).map_err(|_| Error::NotABox { why: "a NUL stands in the text".into() })
}

fn last_error() -> String {
    let error = io::Error::last_os_error();
    if error.raw_os_error() == Some(0) { "no reason was given".into() } else { error.to_string() }
}

fn attr(object: &Obj) -> Option<&Attr> {
    // SAFETY: NULL or valid as long as the object.
    unsafe { object.attr.as_ref() }
}

/// Maps a number of `hwloc_obj_type_t`. It is read as an integer, since a later 2.x may add types.
fn kind_of(object: &Obj) -> RawKind {
    match object.kind {
        1 => RawKind::Package,
        2 => RawKind::Core,
        3 => RawKind::Pu,
        6 => RawKind::L3,
        13 => RawKind::NumaNode,
        14 => {
            // SAFETY: hwloc gives bridges the bridge part of the union.
            let upstream = attr(object).map(|attr| unsafe { attr.bridge }.upstream_type);
            if upstream == Some(1) { RawKind::PciBridge } else { RawKind::HostBridge }
        }
        15 => RawKind::PciDevice,
        16 => RawKind::OsDevice,
        _ => RawKind::Other,
    }
}

/// The members of a set, ascending.
fn members(set: *const c_void) -> Vec<u32> {
    if set.is_null() {
        return Vec::new();
    }
    let next = |previous: &c_int| {
        // SAFETY: the set is a valid bitmap of the topology that is being read.
        let next = unsafe { hwloc_bitmap_next(set, *previous) };
        (0..MOST_IN_A_SET).contains(&next).then_some(next)
    };
    std::iter::successors(next(&-1), next).filter_map(|n| u32::try_from(n).ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_second_api_version_is_accepted() {
        assert!(check_version(0x0002_0000).is_ok());
        assert!(check_version(0x0002_0a01).is_ok());
        assert!(check_version(0x0001_0b00).is_err());
        let refused = check_version(0x0003_0000).unwrap_err();
        assert!(refused.to_string().contains("0x30000"), "{refused}");
    }

    #[test]
    fn a_synthetic_box_is_not_this_machine_and_reads_as_described() {
        let text = c_text("pack:2 numa:1 l3:1 core:4 pu:2").unwrap();
        let handle = Handle::load(Input::Synthetic(&text)).unwrap();
        assert!(!handle.is_this_machine());
        let raw = handle.read();
        let count = |kind| raw.objects.iter().filter(|o| o.kind == kind).count();
        assert_eq!(
            [RawKind::Package, RawKind::NumaNode, RawKind::L3, RawKind::Core, RawKind::Pu]
                .map(count),
            [2, 2, 2, 8, 16]
        );
        assert_eq!(raw.allowed_cpus, (0..16).collect::<Vec<_>>());
    }

    #[test]
    fn this_machine_is_this_machine() {
        let handle = Handle::load(Input::Live).unwrap();
        assert!(handle.is_this_machine());
        assert!(!handle.read().objects.is_empty());
    }
}
