//! Control flow: the instructions at which lanes reconverge after a branch.

use super::op::{Instruction, Op};

/// By instruction, the start of its block's immediate post-dominator; `code.len()` is the end.
pub(super) fn meets(code: &[Instruction]) -> Vec<usize> {
    let blocks = Blocks::of(code);
    let parents = blocks.post_dominators();
    (0..code.len())
        .map(|at| {
            let block = blocks.block_of[at];
            blocks.starts.get(parents[block]).copied().unwrap_or(code.len())
        })
        .collect()
}

struct Blocks {
    /// First instruction of each block.
    starts: Vec<usize>,
    block_of: Vec<usize>,
    /// Blocks that follow each block; the number of blocks means the kernel's end.
    next: Vec<Vec<usize>>,
}

impl Blocks {
    fn of(code: &[Instruction]) -> Self {
        let mut leads = vec![false; code.len() + 1];
        leads[0] = true;
        for (at, instruction) in code.iter().enumerate() {
            match instruction.op {
                Op::Branch { to } => (leads[to], leads[at + 1]) = (true, true),
                Op::Return => leads[at + 1] = true,
                _ => {}
            }
        }
        let starts: Vec<usize> = (0..code.len()).filter(|&at| leads[at]).collect();
        let block_of: Vec<usize> = leads[..code.len()]
            .iter()
            .scan(0, |count, &lead| {
                *count += usize::from(lead);
                Some(*count - 1)
            })
            .collect();
        let end = starts.len();
        let number = |at: usize| block_of.get(at).copied().unwrap_or(end);
        let next = (0..end)
            .map(|block| {
                let after = starts.get(block + 1).copied().unwrap_or(code.len());
                let last = &code[after - 1];
                let through = last.guard.is_some().then(|| number(after));
                match last.op {
                    Op::Branch { to } => {
                        [Some(number(to)), through].into_iter().flatten().collect()
                    }
                    Op::Return => [Some(end), through].into_iter().flatten().collect(),
                    _ => vec![number(after)],
                }
            })
            .collect();
        Self { starts, block_of, next }
    }

    /// Immediate post-dominator of each block, by the algorithm of Cooper, Harvey and Kennedy on
    /// the reversed graph.
    fn post_dominators(&self) -> Vec<usize> {
        let end = self.starts.len();
        let order = self.backward_order();
        let mut rank = vec![usize::MAX; end + 1];
        for (at, &block) in order.iter().enumerate() {
            rank[block] = at;
        }
        let mut parent = vec![usize::MAX; end + 1];
        parent[end] = end;
        let mut changed = true;
        while changed {
            changed = false;
            for &block in &order[1..] {
                let known = self.next[block].iter().copied().filter(|&b| parent[b] != usize::MAX);
                let found = known.reduce(|a, b| common(&parent, &rank, a, b)).unwrap_or(end);
                changed |= parent[block] != found;
                parent[block] = found;
            }
        }
        // Lanes of a block that never reaches the end do not reconverge before the end.
        parent.iter().map(|&found| if found == usize::MAX { end } else { found }).collect()
    }

    /// Blocks in reverse postorder of the reversed graph, from the kernel's end.
    fn backward_order(&self) -> Vec<usize> {
        let end = self.starts.len();
        let mut before = vec![Vec::new(); end + 1];
        for (block, next) in self.next.iter().enumerate() {
            next.iter().for_each(|&to| before[to].push(block));
        }
        let (mut order, mut seen) = (Vec::new(), vec![false; end + 1]);
        let mut stack = vec![(end, 0)];
        seen[end] = true;
        while let Some((block, at)) = stack.pop() {
            let Some(&to) = before[block].get(at) else {
                order.push(block);
                continue;
            };
            stack.push((block, at + 1));
            if !seen[to] {
                seen[to] = true;
                stack.push((to, 0));
            }
        }
        order.reverse();
        order
    }
}

/// The nearest common post-dominator of two blocks.
fn common(parent: &[usize], rank: &[usize], mut a: usize, mut b: usize) -> usize {
    while a != b {
        if rank[a] > rank[b] {
            a = parent[a];
        } else {
            b = parent[b];
        }
    }
    a
}
