//! A disk that loses power. Only synced data is sure to survive: a file's data by fsync of the
//! file, a name by fsync of its directory. Any part of the rest may survive, in any order.

use super::trace::Op;
use std::collections::{BTreeMap, BTreeSet};

/// State of a file system after a crash: contents by path, `None` for a directory.
pub(crate) type Tree = BTreeMap<String, Option<Vec<u8>>>;

#[derive(Clone, Default)]
struct Inode {
    /// Entries of a directory; `None` for a file.
    entries: Option<BTreeMap<String, usize>>,
    bytes: Vec<u8>,
}

/// A change of names that is not synced.
#[derive(Clone)]
enum NameChange {
    Link { dir: usize, name: String, node: usize },
    Unlink { dir: usize, name: String },
    Rename { dir: usize, from: String, to: String, node: usize },
}

impl NameChange {
    const fn dir(&self) -> usize {
        match self {
            Self::Link { dir, .. } | Self::Unlink { dir, .. } | Self::Rename { dir, .. } => *dir,
        }
    }

    fn apply(&self, nodes: &mut BTreeMap<usize, Inode>) {
        let node = nodes.entry(self.dir()).or_default();
        let entries = node.entries.get_or_insert_default();
        match self {
            Self::Link { name, node, .. } => drop(entries.insert(name.clone(), *node)),
            Self::Unlink { name, .. } => drop(entries.remove(name)),
            Self::Rename { from, to, node, .. } => {
                entries.remove(from);
                entries.insert(to.clone(), *node);
            }
        }
    }
}

/// Fate of data that is not synced.
#[derive(Clone, Copy, PartialEq)]
enum Data {
    Lost,
    Kept,
    Half,
    /// The length survives, the contents do not.
    Zeros,
}

#[derive(Default)]
pub(crate) struct Disk {
    live: BTreeMap<usize, Inode>,
    durable: BTreeMap<usize, Inode>,
    pending: Vec<NameChange>,
    dirty: BTreeSet<usize>,
}

/// Root of the inspected folder; it exists, and is empty.
pub(crate) const ROOT: usize = 0;

impl Disk {
    pub(crate) fn new() -> Self {
        let root = Inode { entries: Some(BTreeMap::new()), bytes: Vec::new() };
        let nodes: BTreeMap<_, _> = [(ROOT, root)].into();
        Self { live: nodes.clone(), durable: nodes, ..Self::default() }
    }

    pub(crate) fn apply(&mut self, op: &Op) {
        match op {
            Op::Create { dir, name, node, folder } => {
                let entries = folder.then(BTreeMap::new);
                let new = Inode { entries, bytes: Vec::new() };
                self.live.insert(*node, new.clone());
                self.durable.insert(*node, new);
                self.change(NameChange::Link { dir: *dir, name: name.clone(), node: *node });
            }
            Op::Unlink { dir, name } => {
                self.change(NameChange::Unlink { dir: *dir, name: name.clone() });
            }
            Op::Rename { dir, from, to, node } => self.change(NameChange::Rename {
                dir: *dir,
                from: from.clone(),
                to: to.clone(),
                node: *node,
            }),
            Op::Write { node, at, bytes } => {
                let file = &mut self.live.get_mut(node).unwrap().bytes;
                file.resize(file.len().max(at + bytes.len()), 0);
                file[*at..at + bytes.len()].copy_from_slice(bytes);
                self.dirty.insert(*node);
            }
            Op::Truncate { node, len } => {
                self.live.get_mut(node).unwrap().bytes.resize(*len, 0);
                self.dirty.insert(*node);
            }
            Op::Sync { node, .. } => {
                let (synced, rest) =
                    std::mem::take(&mut self.pending).into_iter().partition(|c| c.dir() == *node);
                self.pending = rest;
                let synced: Vec<NameChange> = synced;
                synced.iter().for_each(|change| change.apply(&mut self.durable));
                if self.dirty.remove(node) {
                    let bytes = self.live[node].bytes.clone();
                    self.durable.get_mut(node).unwrap().bytes = bytes;
                }
            }
            Op::Saved(_) => {}
        }
    }

    fn change(&mut self, change: NameChange) {
        change.apply(&mut self.live);
        self.pending.push(change);
    }

    /// All possible states after a power cut now. If few items are not synced, every subset of the
    /// items survives; otherwise none, all, each alone, and all but each. Data gets every fate.
    pub(crate) fn after_power_cut(&self, most: usize) -> Vec<Tree> {
        let (names, data) = (self.pending.len(), self.dirty.len());
        let items = names + data;
        let mut subsets: Vec<Vec<bool>> = if items <= most {
            (0..1_usize << items)
                .map(|set| (0..items).map(|i| set >> i & 1 == 1).collect())
                .collect()
        } else {
            let alone = |i: usize, on: bool| (0..items).map(move |j| (i == j) == on).collect();
            let each = (0..items).flat_map(|i| [alone(i, true), alone(i, false)]);
            each.chain([vec![false; items], vec![true; items]]).collect()
        };
        // As in a journal: the changes up to the i-th in order, and no later ones.
        subsets.extend((0..=names).map(|i| (0..items).map(|j| j < i).collect()));
        let mut found = Vec::new();
        for set in subsets {
            for lost in [Data::Lost, Data::Half, Data::Zeros] {
                found.push(self.tree(&set, lost));
                if self.dirty.is_empty() {
                    break;
                }
            }
        }
        found
    }

    /// State with the `kept` pending changes and unsynced data; other data has the fate `lost`.
    fn tree(&self, kept: &[bool], lost: Data) -> Tree {
        let mut nodes = self.durable.clone();
        let (names, data) = kept.split_at(self.pending.len());
        for (change, _) in self.pending.iter().zip(names).filter(|(_, kept)| **kept) {
            change.apply(&mut nodes);
        }
        for (node, kept) in self.dirty.iter().zip(data) {
            let (live, bytes) = (&self.live[node].bytes, &mut nodes.get_mut(node).unwrap().bytes);
            // Data that was synced and not written since then stays.
            let safe = if live.starts_with(bytes) { bytes.len() } else { 0 };
            match if *kept { Data::Kept } else { lost } {
                Data::Lost => {}
                Data::Kept => bytes.clone_from(live),
                Data::Half => *bytes = live[..safe + (live.len() - safe) / 2].to_vec(),
                Data::Zeros => {
                    bytes.clone_from(live);
                    bytes[safe..].fill(0);
                }
            }
        }
        let mut tree = Tree::new();
        walk(&nodes, ROOT, "", &mut tree);
        tree
    }
}

fn walk(nodes: &BTreeMap<usize, Inode>, at: usize, path: &str, tree: &mut Tree) {
    let Some(entries) = &nodes[&at].entries else {
        tree.insert(path.to_owned(), Some(nodes[&at].bytes.clone()));
        return;
    };
    if !path.is_empty() {
        tree.insert(path.to_owned(), None);
    }
    for (name, node) in entries {
        let slash = if path.is_empty() { "" } else { "/" };
        walk(nodes, *node, &format!("{path}{slash}{name}"), tree);
    }
}
