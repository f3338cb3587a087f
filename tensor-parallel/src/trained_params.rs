//! The parameters of a model that a run trains.

use crate::adapter_shape::{AdapterShape, is_factor};
use crate::frozen_params::FrozenParams;

/// The parameters that a run trains.
#[derive(Clone, PartialEq, Debug, Default)]
pub enum TrainedParams {
    /// All parameters.
    #[default]
    All,
    /// The factors of these adapters alone. Only then a model has adapters.
    Adapters(AdapterShape),
    /// All parameters except the named parameters.
    AllBut(FrozenParams),
}

impl TrainedParams {
    /// The same parameters for passes that drop nothing.
    #[must_use]
    pub fn without_dropout(&self) -> Self {
        match self {
            Self::Adapters(adapters) => Self::Adapters(AdapterShape { dropout: 0.0, ..*adapters }),
            Self::All | Self::AllBut(_) => self.clone(),
        }
    }

    /// Whether the parameter with the global name `name` is trained.
    pub fn contains(&self, name: &str) -> bool {
        match self {
            Self::All => true,
            Self::Adapters(_) => is_factor(name),
            Self::AllBut(frozen) => !frozen.contains(name),
        }
    }
}
