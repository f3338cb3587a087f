//! Starts, stops, faults and resumption of runs.

mod fault_points;
mod faults;
mod processes;
mod resume;
mod start_and_end;
mod stops;
mod verify;
