//! The stand-ins for the CUDA driver, cuBLASLt and NCCL, called as cudarc calls the libraries, and
//! the interpreter of PTX.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/ranks.rs"]
mod ranks;

mod blaslt;
mod cudnn;
mod driver;
mod failures;
mod interpreter;
mod nccl;
mod overhead;
mod processes;
