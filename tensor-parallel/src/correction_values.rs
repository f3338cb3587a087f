//! Values of the corrections of routers on the device.

use crate::decoder::{Decoder, SegmentRole};
use crate::router_correction::elements;
use device::{Device, Error};

impl Decoder {
    /// Writes the corrections of routers to the device, once before the first pass. `values` reads
    /// parameters in fp32, given the number of a segment and the first element in its flat buffer.
    ///
    /// # Errors
    /// As `values` and [`Device::write`].
    pub fn write_router_corrections<E: From<Error>>(
        &self,
        dev: &Device,
        values: impl Fn(usize, usize, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some(corrections) = self.router_corrections() else { return Ok(()) };
        let shape = self.shape();
        let sparse = (0..shape.layers).filter(|layer| shape.kind(*layer).experts);
        for (index, layer) in sparse.enumerate() {
            let segment = self.segment(SegmentRole::Block(layer));
            let range = elements(&self.segments()[segment]);
            let range = range.unwrap_or_else(|| unreachable!("a router by sigmoid has numbers"));
            let mut numbers = vec![0.0; range.len()];
            values(segment, range.start, &mut numbers)?;
            dev.write(corrections.of_layer(index), &|i| f64::from(numbers[i]))?;
        }
        Ok(())
    }
}
