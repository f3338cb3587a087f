//! Descriptions of machines: boxes, cores and their warnings.

mod boxes;
mod cores;
mod warnings;
