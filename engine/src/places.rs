//! Where the ranks of a run go on this machine.

/// One place per rank; none where threads are not to be bound, or cannot be.
pub(crate) fn places(bind: bool, world_size: usize) -> Vec<topology::RankPlace> {
    if !bind {
        return Vec::new();
    }
    match topology::Machine::discover() {
        // More ranks than cores are better off with a scheduler that moves them.
        Ok(machine) if machine.allowed_cpus.len() < world_size => {
            tracing::info!("more ranks than CPUs: threads and memory are not bound");
            Vec::new()
        }
        Ok(machine) => {
            let places = topology::place_ranks(&machine, world_size);
            places.iter().for_each(|place| tracing::info!("{place}"));
            places
        }
        Err(error) => {
            tracing::warn!("threads are not bound: {error}");
            Vec::new()
        }
    }
}
