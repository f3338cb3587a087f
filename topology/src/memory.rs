//! The machine's memory, and the part of it that this process may still allocate.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Bytes of host memory that can be allocated now: the kernel's `MemAvailable`, or less under a
/// cgroup's limit. File pages without recent use can be dropped and do not count
/// against the limit. [`u64::MAX`] if the kernel reports nothing.
pub fn available_memory() -> u64 {
    available_memory_under(Path::new("/"))
}

pub(crate) fn available_memory_under(root: &Path) -> u64 {
    let machine = figure(&root.join("proc/meminfo"), "MemAvailable:").unwrap_or(u64::MAX);
    machine.min(cgroup_headroom(root).unwrap_or(u64::MAX))
}

/// Resident memory of this process in bytes; 0 if the kernel reports nothing.
pub fn resident_memory() -> u64 {
    figure(Path::new("/proc/self/status"), "VmRSS:").unwrap_or(0)
}

/// Bytes of memory of the machine, from `/proc/meminfo` under `root`.
pub(crate) fn total_memory_under(root: &Path) -> Option<u64> {
    figure(&root.join("proc/meminfo"), "MemTotal:")
}

/// Text of a kernel file in proc or sys; `None` if it cannot be read.
#[expect(clippy::disallowed_methods, reason = "the crate is below `files`: the limit is here")]
pub(crate) fn kernel_text(file: &Path) -> Option<String> {
    /// Largest number of bytes to read; the files of a machine with a thousand cores are a tenth as
    /// large.
    const LONGEST: u64 = 32 << 20;
    let mut text = String::new();
    File::open(file).ok()?.take(LONGEST).read_to_string(&mut text).ok()?;
    Some(text)
}

/// One figure of a kernel file in bytes, from a line like `MemTotal:       24684084 kB`.
fn figure(file: &Path, key: &str) -> Option<u64> {
    let text = kernel_text(file)?;
    let line = text.lines().find_map(|line| line.strip_prefix(key))?;
    let kib: u64 = line.split_whitespace().next()?.parse().ok()?;
    kib.checked_mul(1024)
}

/// The file names of one cgroup version.
struct CgroupFiles {
    mount: &'static str,
    limit: &'static str,
    usage: &'static str,
    droppable: &'static str,
}

const V2: CgroupFiles = CgroupFiles {
    mount: "sys/fs/cgroup",
    limit: "memory.max",
    usage: "memory.current",
    droppable: "inactive_file",
};
const V1: CgroupFiles = CgroupFiles {
    mount: "sys/fs/cgroup/memory",
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    droppable: "total_inactive_file",
};

/// Bytes left under the strictest limit of this process's cgroups; `None` without a limit.
fn cgroup_headroom(root: &Path) -> Option<u64> {
    // Lines are `0::/path` (version 2) or `4:memory:/path` (version 1); both may be present.
    let text = kernel_text(&root.join("proc/self/cgroup"))?;
    let of_line = |line: &str| {
        let (_, rest) = line.split_once(':')?;
        let (controllers, path) = rest.split_once(':')?;
        let files = match controllers {
            "" => &V2,
            _ if controllers.split(',').any(|name| name == "memory") => &V1,
            _ => return None,
        };
        headroom_up_from(root, path, files)
    };
    text.lines().filter_map(of_line).min()
}

/// Bytes left under the strictest limit of the cgroup `path` and of its parents, whose limits
/// hold as well. In a container `path` may be the host's and not exist; the mount's root is then
/// the container's own cgroup.
fn headroom_up_from(root: &Path, path: &str, files: &CgroupFiles) -> Option<u64> {
    let mount = root.join(files.mount);
    let inside: PathBuf = mount.join(path.trim_start_matches('/'));
    let groups = inside.ancestors().take_while(|group| group.starts_with(&mount));
    groups.filter_map(|group| headroom_in(group, files)).min()
}

/// Bytes left in one cgroup; `None` without a limit (version 2 writes `max`).
fn headroom_in(group: &Path, files: &CgroupFiles) -> Option<u64> {
    let read = |name| kernel_text(&group.join(name));
    let limit: u64 = read(files.limit)?.trim().parse().ok()?;
    let usage: u64 = read(files.usage).and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    let stat = read("memory.stat").unwrap_or_default();
    let droppable = stat.lines().find_map(|line| {
        let (key, bytes) = line.split_once(' ')?;
        if key == files.droppable { bytes.trim().parse::<u64>().ok() } else { None }
    });
    Some(limit.saturating_sub(usage.saturating_sub(droppable.unwrap_or(0))))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;
    use std::fs;

    /// A folder that stands for `/` with its `/proc` and `/sys`. Drop removes it.
    pub(crate) struct Tree(PathBuf);

    impl Tree {
        pub(crate) fn new() -> Self {
            static NEXT: AtomicU32 = AtomicU32::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("onebox-topology-{}-{number}", std::process::id());
            let root = std::env::temp_dir().join(name);
            fs::create_dir_all(&root).unwrap();
            Self(root)
        }

        pub(crate) fn root(&self) -> &Path {
            &self.0
        }

        pub(crate) fn write(&self, path: &str, text: &str) {
            let path = self.0.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
    }

    impl Drop for Tree {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn tree_with(available_kib: u64, cgroup: &str) -> Tree {
        let tree = Tree::new();
        tree.write(
            "proc/meminfo",
            &format!("MemTotal: 9000 kB\nMemAvailable: {available_kib} kB\n"),
        );
        tree.write("proc/self/cgroup", cgroup);
        tree
    }

    #[test]
    fn this_machine_has_memory_to_give() {
        let available = available_memory();
        assert!(available > 0 && available < u64::MAX);
    }

    #[test]
    fn without_a_limit_the_kernels_figure_holds() {
        let tree = tree_with(1000, "0::/user.slice\n");
        tree.write("sys/fs/cgroup/user.slice/memory.max", "max\n");
        tree.write("sys/fs/cgroup/user.slice/memory.current", "5\n");
        assert_eq!(available_memory_under(tree.root()), 1_024_000);
        assert_eq!(available_memory_under(Tree::new().root()), u64::MAX);
    }

    #[test]
    fn the_tightest_cgroup_above_the_process_counts() {
        let tree = tree_with(1000, "0::/outer/inner\n");
        tree.write("sys/fs/cgroup/outer/inner/memory.max", "900000");
        tree.write("sys/fs/cgroup/outer/memory.max", "500000\n");
        tree.write("sys/fs/cgroup/outer/memory.current", "200000\n");
        tree.write("sys/fs/cgroup/outer/memory.stat", "anon 150000\ninactive_file 50000\n");
        assert_eq!(available_memory_under(tree.root()), 350_000);
        tree.write("sys/fs/cgroup/outer/memory.current", "700000\n");
        assert_eq!(available_memory_under(tree.root()), 0);
    }

    #[test]
    fn version_1_limits_count_even_where_the_path_is_the_hosts() {
        let tree = tree_with(1000, "9:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n");
        tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "300000\n");
        tree.write("sys/fs/cgroup/memory/memory.usage_in_bytes", "100000\n");
        tree.write(
            "sys/fs/cgroup/memory/memory.stat",
            "inactive_file 7\ntotal_inactive_file 10000\n",
        );
        assert_eq!(available_memory_under(tree.root()), 210_000);
        // Version 1 writes a number near 2^63 for no limit.
        tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(available_memory_under(tree.root()), 1_024_000);
    }
}
