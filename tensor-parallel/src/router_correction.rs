//! Corrections of the scores of routers (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). They change
//! the choice of experts, and have no gradient, so no update changes them. Each is a parameter of its
//! block, so that checkpoints, weights and exports have it. Routers read a copy in fp32, since
//! parameters on the device may have 16 bits.

use crate::params::{Init, ParamDeclarations, SegmentLayout, Split};
use crate::shape::{DecoderShape, ExpertsShape};
use device::{Arena, Device, Dtype, Error, Plan, Tensor};
use std::ops::Range;

/// Name of the parameter.
pub(crate) const CORRECTION: &str = "moe.router.correction";

/// The corrections of all layers with experts on the device: (layers with experts, E) F32.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RouterCorrections(Tensor);

/// Declares the correction of a layer, if its router has one.
pub(crate) fn declare(params: &mut ParamDeclarations, experts: &ExpertsShape) {
    if experts.sigmoid.is_some() {
        params.add_vector(CORRECTION, experts.count, Split::Replicated, Init::Constant(0.0));
    }
}

impl RouterCorrections {
    /// Plans the corrections, if routers have some.
    pub(crate) fn plan(plan: &mut Plan, shape: &DecoderShape) -> Option<Self> {
        let experts = shape.experts.filter(|experts| experts.sigmoid.is_some())?;
        let (at, size) = ((Arena::Device, "constants"), (shape.expert_layers(), experts.count));
        Some(Self(plan.tensor(at, "router_corrections", Dtype::F32, size)))
    }

    /// Writes zeros to the device.
    pub(crate) fn clear(self, dev: &Device) -> Result<(), Error> {
        dev.write(self.0, &|_| 0.0)
    }

    /// (1, E): the correction of layer number `index` of the layers with experts.
    pub(crate) fn of_layer(self, index: usize) -> Tensor {
        self.0.rows(index..index + 1)
    }
}

/// Elements of the correction in the flat buffer of a block's segment, if its router has one.
pub(crate) fn elements(layout: &SegmentLayout) -> Option<Range<usize>> {
    let is_correction = |name: &str| name.ends_with(CORRECTION);
    layout.all_params().find(|param| is_correction(&param.name)).map(|param| param.range.clone())
}
