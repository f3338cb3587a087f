//! All contact with hwloc: a loaded topology of this machine, its cores, and the binding of the calling thread.
//!
//! Only calls of `hwloc2` that were read and found sound are used: `Topology::new`, `support`, the tree of normal
//! objects (`objects_at_depth`, `children`, `object_type`, `os_index`), `set_cpubind`, `get_cpubind`, and owned bitmaps.
#![expect(unsafe_code, reason = "declares the one C function that hwloc2 does not offer")]

use std::ffi::c_uint;
use std::io;

use hwloc2::{CpuBindError, CpuBindFlags, CpuSet, ObjectType, Topology, TopologyObject};

use crate::Error;

// SAFETY: this is hwloc.h's `unsigned hwloc_get_api_version(void)`, unchanged since hwloc 1.0. It takes nothing and
// touches no state, so any caller may call it. hwloc2 links the library.
unsafe extern "C" {
    safe fn hwloc_get_api_version() -> c_uint;
}

/// hwloc's view of the machine on which this process runs.
pub(crate) struct Hwloc {
    topology: Topology,
}

impl Hwloc {
    /// Loads the topology: milliseconds, more on a large box, so do it once.
    pub(crate) fn load() -> Result<Self, Error> {
        check_version(hwloc_get_api_version())?;
        let topology = Topology::new().ok_or(Error::HwlocLoad)?;
        if !topology.support().cpu().set_current_thread() {
            return Err(Error::NotThisMachine);
        }
        Ok(Self { topology })
    }

    /// The logical CPUs of each physical core, in hwloc's order (neighbours share caches). CPUs that a cgroup denies
    /// are absent.
    pub(crate) fn cores(&self) -> Vec<Vec<u32>> {
        // Some virtual machines report no cores; there every CPU counts as one.
        let depth = self
            .topology
            .depth_for_type(&ObjectType::Core)
            .or_else(|_| self.topology.depth_for_type(&ObjectType::PU));
        let Ok(depth) = depth else { return Vec::new() };
        let objects = self.topology.objects_at_depth(depth);
        objects.into_iter().map(cpus_below).filter(|cpus| !cpus.is_empty()).collect()
    }

    /// Binds the calling thread; says nothing about CPUs that the kernel leaves out.
    pub(crate) fn bind_current_thread(&mut self, cpus: &[u32]) -> Result<(), io::Error> {
        let set: CpuSet = cpus.iter().copied().collect();
        self.topology
            .set_cpubind(set, CpuBindFlags::CPUBIND_THREAD)
            .map_err(|CpuBindError::Generic(errno, _)| io::Error::from_raw_os_error(errno))
    }

    /// The CPUs on which the calling thread may run, ascending.
    pub(crate) fn current_binding(&self) -> Result<Vec<u32>, Error> {
        let set = self.topology.get_cpubind(CpuBindFlags::CPUBIND_THREAD);
        // hwloc2 drops the error number but makes no other call after the one that failed.
        let set = set.ok_or_else(|| Error::ReadBinding { source: io::Error::last_os_error() })?;
        Ok(set.into_iter().collect())
    }
}

/// hwloc 3 moves fields of the object structure that hwloc2 reads directly.
fn check_version(found: u32) -> Result<(), Error> {
    if found >> 16 == 2 { Ok(()) } else { Err(Error::HwlocVersion { found }) }
}

/// The logical CPUs at and under `object`, ascending.
fn cpus_below(object: &TopologyObject) -> Vec<u32> {
    let mut cpus = Vec::new();
    let mut open = vec![object];
    while let Some(object) = open.pop() {
        if matches!(object.object_type(), ObjectType::PU) {
            cpus.push(object.os_index());
        }
        open.extend(object.children());
    }
    cpus.sort_unstable();
    cpus
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
    fn every_cpu_belongs_to_one_core() {
        let cores = Hwloc::load().unwrap().cores();
        let mut cpus = cores.concat();
        assert!(!cpus.is_empty());
        let all = cpus.len();
        cpus.sort_unstable();
        cpus.dedup();
        assert_eq!(cpus.len(), all);
    }
}
