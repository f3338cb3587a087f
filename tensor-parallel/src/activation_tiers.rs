//! The tiers of activations: the place of a block's activations between its forward and its
//! backward pass. The two branches of a block, attention and the MLP, have a tier each.

/// The place of the activations of a branch of one block, until its backward pass reads them.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Tier {
    /// Memory of the device that belongs to the block.
    Device,
    /// Host memory. Both copies run while other blocks compute.
    Host,
    /// None: the backward pass computes them again, into memory that blocks share.
    Recomputed,
}

/// Numbers of blocks by the tier of one branch. All other blocks compute the branch again.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct TierCounts {
    /// Number of blocks, counted from the last, whose activations stay on the device.
    pub device: usize,
    /// Number of blocks whose activations move to the host, spread evenly over the other blocks.
    pub host: usize,
}

/// The tiers of both branches of all blocks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ActivationTiers {
    /// Tiers of the attention branch: normed input, q, k and v, attention's output, and the sum of
    /// the residual stream after it.
    pub attention: TierCounts,
    /// Tiers of the MLP branch: normed input, and both sides of its activation; of experts also their
    /// outputs.
    pub mlp: TierCounts,
}

impl TierCounts {
    /// All blocks compute the branch again.
    pub const NONE: Self = Self { device: 0, host: 0 };

    /// The tier of block `layer` of `layers` blocks. The last blocks are on the device, since the
    /// backward pass reads them first. The copies of other blocks run at the same time.
    pub const fn tier(self, layer: usize, layers: usize) -> Tier {
        let others = layers.saturating_sub(self.device);
        if layer >= others {
            return Tier::Device;
        }
        let host = if self.host < others { self.host } else { others };
        if (layer + 1) * host / others > layer * host / others {
            Tier::Host
        } else {
            Tier::Recomputed
        }
    }
}

impl ActivationTiers {
    /// All blocks compute both branches again.
    pub const NONE: Self = Self { attention: TierCounts::NONE, mlp: TierCounts::NONE };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_have_the_numbers_of_blocks_that_are_asked_for() {
        for layers in 1..20 {
            for device in 0..=layers {
                for host in 0..=layers - device {
                    let counts = TierCounts { device, host };
                    let all: Vec<Tier> = (0..layers).map(|l| counts.tier(l, layers)).collect();
                    let count = |tier| all.iter().filter(|of| **of == tier).count();
                    let found = (count(Tier::Device), count(Tier::Host));
                    assert_eq!(found, (device, host), "{layers} {all:?}");
                    assert!(all[layers - device..].iter().all(|tier| *tier == Tier::Device));
                }
            }
        }
        // The blocks on the host are spread evenly.
        let spread = |l| TierCounts { device: 2, host: 3 }.tier(l, 11);
        let on_host: Vec<usize> = (0..11).filter(|l| spread(*l) == Tier::Host).collect();
        assert_eq!(on_host, [2, 5, 8]);
    }

    #[test]
    fn more_blocks_than_the_model_has_are_all_blocks() {
        let tiers = |counts: TierCounts| [0, 1].map(|layer| counts.tier(layer, 2));
        assert_eq!(tiers(TierCounts { device: 5, host: 5 }), [Tier::Device; 2]);
        assert_eq!(tiers(TierCounts { device: 1, host: 5 }), [Tier::Host, Tier::Device]);
        assert_eq!(tiers(TierCounts::NONE), [Tier::Recomputed; 2]);
    }
}
