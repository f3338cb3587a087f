//! Runs the blocks of a grid.

use std::collections::HashSet;

use super::alu::keep;
use super::block_state::{BlockState, Run};
use super::fault::FaultKind;
use super::kernel::Kernel;
use super::memory::{Memory, Region};
use super::step::{StepOutcome, land, step};
use super::warp::Warp;

/// Instructions of one warp after which a kernel counts as endless.
const MOST_STEPS: u64 = 1 << 32;

/// Size of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Shape {
    /// Number of blocks in each dimension.
    pub grid: [u32; 3],
    /// Number of threads in a block.
    pub block: u32,
    /// Bytes of dynamic shared memory.
    pub shared_bytes: u32,
}

impl Kernel {
    /// Runs the kernel. `arguments` are its parameters in order, each in the lower bytes of a word.
    pub fn run(
        &self,
        shape: &Shape,
        arguments: &[u64],
        memory: &mut Memory,
    ) -> Result<Run, String> {
        if arguments.len() != self.parameters.len() {
            let (given, wanted) = (arguments.len(), self.parameters.len());
            return Err(format!("{}: {given} arguments for {wanted} parameters", self.name));
        }
        memory.begin();
        // Dynamic memory follows the declared memory, with the alignment that kernels declare.
        let dynamic = self.shared_bytes.next_multiple_of(16);
        let mut warps: Vec<Warp> = (0..shape.block as usize)
            .step_by(32)
            .map(|first| Warp::new(self, first, shape.block as usize - first))
            .collect();
        for warp in &mut warps {
            for ((&register, &bytes), &value) in
                self.arguments.iter().zip(&self.parameters).zip(arguments)
            {
                warp.file[register] = [keep(value, 8 * bytes as u32); 32];
            }
            self.dynamic.iter().for_each(|&register| warp.file[register] = [dynamic as u64; 32]);
        }
        let shared = Region::shared(dynamic + shape.shared_bytes as usize);
        let mut room = BlockState {
            kernel: self,
            memory,
            shared,
            run: Run::default(),
            seen: HashSet::new(),
            block: [0; 3],
            number: 0,
            epoch: 0,
        };
        room.grid(shape, &mut warps);
        let mut run = room.run;
        run.counts.touched = memory.touched();
        Ok(run)
    }
}

impl BlockState<'_> {
    fn grid(&mut self, shape: &Shape, warps: &mut [Warp]) {
        let [x, y, z] = shape.grid;
        for number in 0..x as usize * y as usize * z as usize {
            let across = number as u32 / x;
            self.block = [number as u32 % x, across % y, across / y];
            (self.number, self.epoch) = (number, 0);
            self.shared.forget();
            warps
                .iter_mut()
                .for_each(|warp| warp.start(self.kernel, self.block, shape.grid, shape.block));
            if !self.block(warps) {
                return;
            }
            // Copies end with their block at the latest.
            warps.iter_mut().for_each(|warp| land(self, warp, u32::MAX, None));
        }
    }

    /// Runs a block to its end; false if a fault ends the launch.
    fn block(&mut self, warps: &mut [Warp]) -> bool {
        loop {
            for warp in warps.iter_mut() {
                if !self.warp(warp) {
                    return false;
                }
            }
            let waiting = warps.iter().filter(|warp| warp.waits).count();
            if waiting == 0 {
                return true;
            }
            if waiting < warps.len() {
                let ended = warps.iter_mut().find(|warp| !warp.waits).map_or(0, |warp| warp.first);
                if let Some(at) = warps.iter_mut().find(|warp| warp.waits) {
                    let next = at.next(self.kernel).map_or(0, |(next, _)| next.saturating_sub(1));
                    let about = format!("the warp of thread {ended} ended before this barrier");
                    self.report(FaultKind::Parted, next, at.first, about);
                }
                return false;
            }
            self.epoch += 1;
            warps.iter_mut().for_each(|warp| (warp.waits, warp.within) = (false, 0));
        }
    }

    /// Runs a warp to a barrier or to its end; false if a fault ends the launch.
    fn warp(&mut self, warp: &mut Warp) -> bool {
        for _ in 0..MOST_STEPS {
            let Some((at, lanes)) = warp.next(self.kernel) else { return true };
            match step(self, warp, at, lanes) {
                StepOutcome::Next => {}
                StepOutcome::Barrier => return true,
                StepOutcome::Over => return false,
            }
        }
        self.report(FaultKind::Endless, 0, warp.first, format!("after {MOST_STEPS} instructions"));
        false
    }
}
