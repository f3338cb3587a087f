//! System calls of a run in strace's log, and their changes to the files of its directory.

use super::disk::ROOT;
use std::collections::{BTreeMap, HashMap};

/// Calls that change files and names. The model knows each of them, or the test fails.
pub(crate) const CALLS: &str = "open,openat,creat,write,writev,pwrite64,pwritev,fsync,fdatasync,rename,renameat,\
    renameat2,mkdir,mkdirat,unlink,unlinkat,rmdir,ftruncate,truncate,link,linkat,symlink,symlinkat,close,fallocate,\
    copy_file_range,sendfile,sync_file_range";

/// A change of the files below the root.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Op {
    Create {
        dir: usize,
        name: String,
        node: usize,
        folder: bool,
    },
    Unlink {
        dir: usize,
        name: String,
    },
    Rename {
        dir: usize,
        from: String,
        to: String,
        node: usize,
    },
    Write {
        node: usize,
        at: usize,
        bytes: Vec<u8>,
    },
    Truncate {
        node: usize,
        len: usize,
    },
    /// A sync of a file or folder, with its path at that time.
    Sync {
        node: usize,
        path: String,
    },
    /// The user was told that the checkpoint of this step is saved.
    Saved(u64),
}

/// A call that succeeded.
pub(crate) struct Call {
    pub(crate) name: String,
    args: Vec<String>,
    value: usize,
}

impl Call {
    fn close(fd: &str) -> Self {
        Self { name: "close".into(), args: vec![fd.to_owned()], value: 0 }
    }

    /// Bytes of a quoted argument, which strace wrote in hexadecimal.
    fn bytes(&self, arg: usize) -> Vec<u8> {
        let text = self.args[arg].trim_matches('"');
        assert!(!self.args[arg].ends_with("..."), "strace cut it short");
        let digits = text.split("\\x").skip(1);
        digits.map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect()
    }

    fn text(&self, arg: usize) -> String {
        String::from_utf8(self.bytes(arg)).unwrap()
    }

    fn fd(&self, arg: usize) -> i64 {
        if self.args[arg] == "AT_FDCWD" { -1 } else { self.args[arg].parse().unwrap() }
    }
}

/// Successful calls in the order of their returns; a `close` counts from its beginning.
pub(crate) fn calls(log: &str) -> Vec<Call> {
    let mut begun: HashMap<&str, String> = HashMap::new();
    let mut found = Vec::new();
    for line in log.lines() {
        let (pid, rest) = line.split_once(' ').unwrap();
        let rest = rest.trim_start();
        if let Some(start) = rest.strip_suffix(" <unfinished ...>") {
            match start.strip_prefix("close(") {
                Some(fd) => found.push(Call::close(fd.trim_end_matches(')'))),
                None => drop(begun.insert(pid, start.to_owned())),
            }
            continue;
        }
        let whole = match rest.strip_prefix("<... ").and_then(|r| r.split_once(" resumed>")) {
            // A call without a beginning here is a `close`, which was handled when it began.
            Some((_, end)) => match begun.remove(pid) {
                Some(start) => start + end,
                None => continue,
            },
            None => rest.to_owned(),
        };
        let Some((call, value)) = whole.rsplit_once(" = ") else { continue };
        let Some((name, args)) = call.trim_end().split_once('(') else { continue };
        let value = value.split(' ').next().unwrap().parse::<i64>();
        let Ok(value) = value.map_err(drop).and_then(|v| usize::try_from(v).map_err(drop)) else {
            continue;
        };
        let args = args.trim_end_matches(')').split(", ").map(str::to_owned).collect();
        found.push(Call { name: name.to_owned(), args, value });
    }
    found
}

/// Target of a descriptor below the root.
struct OpenDescriptor {
    node: usize,
    at: usize,
    append: bool,
}

/// Follows names and descriptors through the calls.
struct CallFollower<'a> {
    root: &'a str,
    /// Entries of the folders, by node.
    folders: BTreeMap<usize, BTreeMap<String, usize>>,
    sizes: BTreeMap<usize, usize>,
    open: HashMap<i64, OpenDescriptor>,
    /// Paths of descriptors, for names relative to them.
    paths: HashMap<i64, String>,
    ops: Vec<Op>,
    next: usize,
}

/// Changes that `calls` made below `root`, an absolute path that was empty before.
pub(crate) fn ops(calls: &[Call], root: &str) -> Vec<Op> {
    let mut follow = CallFollower {
        root,
        folders: [(ROOT, BTreeMap::new())].into(),
        sizes: BTreeMap::new(),
        open: HashMap::new(),
        paths: HashMap::new(),
        ops: Vec::new(),
        next: ROOT + 1,
    };
    calls.iter().for_each(|call| follow.call(call));
    follow.ops
}

impl CallFollower<'_> {
    fn call(&mut self, call: &Call) {
        match call.name.as_str() {
            "openat" => self.opened(call),
            "close" => drop((self.open.remove(&call.fd(0)), self.paths.remove(&call.fd(0)))),
            "write" => self.written(call),
            "fsync" | "fdatasync" => {
                if let Some(open) = self.open.get(&call.fd(0)) {
                    let path = self.paths[&call.fd(0)].clone();
                    self.ops.push(Op::Sync { node: open.node, path });
                }
            }
            "ftruncate" => {
                if let Some(open) = self.open.get(&call.fd(0)) {
                    let len = call.args[1].parse().unwrap();
                    self.sizes.insert(open.node, len);
                    self.ops.push(Op::Truncate { node: open.node, len });
                }
            }
            "mkdir" => self.made(&call.text(0)),
            "mkdirat" => self.made(&self.at(call.fd(0), &call.text(1))),
            "rename" => self.renamed(&call.text(0), &call.text(1)),
            "renameat" | "renameat2" => {
                let [from, to] = [0, 2].map(|arg| self.at(call.fd(arg), &call.text(arg + 1)));
                self.renamed(&from, &to);
            }
            "unlink" | "rmdir" => self.unlinked(&call.text(0)),
            "unlinkat" => {
                let path = self.at(call.fd(0), &call.text(1));
                self.unlinked(&path);
            }
            other => {
                let text = call.args.iter().any(|a| a.starts_with('"') && a.contains("\\x"));
                let known = call.args[0].parse().is_ok_and(|fd: i64| !self.open.contains_key(&fd));
                assert!(known && (!text || other == "writev"), "{other} is not in the model");
            }
        }
    }

    /// Path of `name`, which may be relative to a descriptor.
    fn at(&self, fd: i64, name: &str) -> String {
        match self.paths.get(&fd) {
            Some(folder) if !name.starts_with('/') => format!("{folder}/{name}"),
            _ => name.to_owned(),
        }
    }

    /// Folder and name, if the folder exists below the root.
    fn parent(&self, path: &str) -> Option<(usize, String)> {
        let mut parts: Vec<&str> = path.strip_prefix(self.root)?.split('/').collect();
        parts.retain(|part| !part.is_empty());
        let name = parts.pop()?.to_owned();
        let mut dir = ROOT;
        for part in parts {
            dir = *self.folders[&dir].get(part)?;
        }
        Some((dir, name))
    }

    fn find(&self, path: &str) -> Option<usize> {
        if path.trim_end_matches('/') == self.root {
            return Some(ROOT);
        }
        let (dir, name) = self.parent(path)?;
        self.folders[&dir].get(&name).copied()
    }

    fn create(&mut self, dir: usize, name: &str, folder: bool) -> usize {
        let node = self.next;
        self.next += 1;
        self.folders.get_mut(&dir).unwrap().insert(name.to_owned(), node);
        if folder {
            self.folders.insert(node, BTreeMap::new());
        }
        self.ops.push(Op::Create { dir, name: name.to_owned(), node, folder });
        node
    }

    fn made(&mut self, path: &str) {
        if let Some((dir, name)) = self.parent(path) {
            self.create(dir, &name, true);
        }
    }

    fn opened(&mut self, call: &Call) {
        let (fd, flags) = (call.value as i64, &call.args[2]);
        let path = self.at(call.fd(0), &call.text(1));
        self.open.remove(&fd);
        self.paths.insert(fd, path.clone());
        let node = match self.find(&path) {
            Some(node) => node,
            None if flags.contains("O_CREAT") => {
                let Some((dir, name)) = self.parent(&path) else { return };
                self.create(dir, &name, false)
            }
            None => return,
        };
        if flags.contains("O_TRUNC") {
            self.sizes.insert(node, 0);
            self.ops.push(Op::Truncate { node, len: 0 });
        }
        self.open.insert(fd, OpenDescriptor { node, at: 0, append: flags.contains("O_APPEND") });
    }

    fn written(&mut self, call: &Call) {
        let fd = call.fd(0);
        if fd == 2 {
            let text = String::from_utf8_lossy(&call.bytes(1)).into_owned();
            let saved = text.split("checkpoint of step ").skip(1).filter_map(|rest| {
                let (step, rest) = rest.split_once(' ')?;
                rest.starts_with("saved").then(|| step.parse().unwrap())
            });
            self.ops.extend(saved.map(Op::Saved));
        }
        let Some(open) = self.open.get_mut(&fd) else { return };
        let size = self.sizes.entry(open.node).or_default();
        let at = if open.append { *size } else { open.at };
        let bytes = call.bytes(1)[..call.value].to_vec();
        open.at = at + bytes.len();
        *size = (*size).max(open.at);
        self.ops.push(Op::Write { node: open.node, at, bytes });
    }

    fn renamed(&mut self, from: &str, to: &str) {
        let (Some((dir, from)), Some((other, to))) = (self.parent(from), self.parent(to)) else {
            return;
        };
        assert_eq!(dir, other, "a rename within a folder");
        let folder = self.folders.get_mut(&dir).unwrap();
        let node = folder.remove(&from).unwrap();
        folder.insert(to.clone(), node);
        self.ops.push(Op::Rename { dir, from, to, node });
    }

    fn unlinked(&mut self, path: &str) {
        let Some((dir, name)) = self.parent(path) else { return };
        self.folders.get_mut(&dir).unwrap().remove(&name).unwrap();
        self.ops.push(Op::Unlink { dir, name });
    }
}

/// Calls in a log of strace whose first path begins with `root`, by its name or its descriptor's
/// name. Returns the path, the call, and how often a thread makes the call, as strace counts.
pub(crate) fn changes(log: &str, root: &str) -> Vec<(String, String, usize)> {
    let mut counts: BTreeMap<(String, String), BTreeMap<String, usize>> = BTreeMap::new();
    for line in log.lines() {
        let (thread, line) = line.split_once(' ').unwrap();
        let Some((call, rest)) = line.trim_start().split_once('(') else { continue };
        let Some(at) = rest.find(root).filter(|_| !call.contains(' ')) else { continue };
        let path = rest[at..].split(['"', '>']).next().unwrap();
        let threads = counts.entry((path.to_owned(), call.to_owned())).or_default();
        *threads.entry(thread.to_owned()).or_default() += 1;
    }
    let most = |threads: BTreeMap<String, usize>| threads.into_values().max().unwrap_or(0);
    let change = |((path, call), threads)| (path, call, most(threads));
    counts.into_iter().map(change).collect()
}
