//! The binding of threads through `hwloc2`.
//!
//! It uses only calls that were read and found sound: `Topology::new`, `support`, `set_cpubind`,
//! `get_cpubind`, and owned bitmaps. `hwloc_ext` declares the missing ones.

use std::io;

use hwloc2::{CpuBindError, CpuBindFlags, CpuSet, Topology};

use crate::{Error, hwloc_ext};

/// hwloc's view of the machine on which this process runs.
pub(crate) struct Hwloc {
    topology: Topology,
}

impl Hwloc {
    /// Loads the topology. This takes milliseconds, more on a large box; callers load it once.
    pub(crate) fn load() -> Result<Self, Error> {
        hwloc_ext::check_library()?;
        let why = || "hwloc2 gave no topology".to_owned();
        let topology = Topology::new().ok_or_else(|| Error::HwlocLoad { why: why() })?;
        if !topology.support().cpu().set_current_thread() {
            return Err(Error::NotThisMachine);
        }
        Ok(Self { topology })
    }

    /// Binds the calling thread. CPUs that the kernel leaves out are not reported.
    pub(crate) fn bind_current_thread(&mut self, cpus: &[u32]) -> Result<(), io::Error> {
        let set: CpuSet = cpus.iter().copied().collect();
        self.topology
            .set_cpubind(set, CpuBindFlags::CPUBIND_THREAD)
            .map_err(|CpuBindError::Generic(errno, _)| io::Error::from_raw_os_error(errno))
    }

    /// The CPUs on which the calling thread may run, ascending.
    pub(crate) fn current_binding(&self) -> Result<Vec<u32>, Error> {
        let set = self.topology.get_cpubind(CpuBindFlags::CPUBIND_THREAD);
        // hwloc2 drops the error number, but makes no other call after the failed one.
        let set = set.ok_or_else(|| Error::ReadBinding { source: io::Error::last_os_error() })?;
        Ok(set.into_iter().collect())
    }
}

impl std::fmt::Debug for Hwloc {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Hwloc").finish_non_exhaustive()
    }
}
