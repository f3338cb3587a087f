//! Tasks of other crates on virtual GPUs, and the hazard check.

mod device_tasks;
mod hazards;
mod host_tasks;
