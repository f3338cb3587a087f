//! Runs of several processes under mpirun: results of one process, one verdict, one common end.
#![allow(clippy::unwrap_used, clippy::panic, clippy::print_stdout, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod common;

/// A build without MPI refuses a launcher.
#[cfg(not(feature = "mpi"))]
#[test]
fn a_build_without_mpi_refuses_to_be_one_of_several() {
    println!("SKIPPED but for this: built without --features mpi");
    let folder = common::Folder::new();
    for variable in ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE"] {
        let mut command = folder.command(&["train", "tiny.ron", "--run-dir", "run"]);
        command.env(variable, "2");
        let done = common::Folder::done(command);
        assert_eq!(done.code, 78, "{}", done.stderr);
        assert!(done.stderr.contains("2 times") && done.stderr.contains("--features mpi"));
        assert!(!folder.path("run").exists());
    }
}

#[cfg(feature = "mpi")]
#[path = "cluster/faults.rs"]
mod faults;
#[cfg(feature = "mpi")]
#[path = "cluster/gpus.rs"]
mod gpus;
#[cfg(feature = "mpi")]
#[path = "cluster/launch.rs"]
mod launch;
#[cfg(feature = "mpi")]
#[path = "cluster/network.rs"]
mod network;
#[cfg(feature = "mpi")]
#[path = "cluster/processes.rs"]
mod processes;
#[cfg(feature = "mpi")]
#[path = "cluster/starts.rs"]
mod starts;
