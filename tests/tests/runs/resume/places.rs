//! Runs that resume with their parameters in other memory, on the host or on the device.

use super::BASE;
use super::run_log::{RunLog, assert_goes_on_as, open, run};
use tests::compare::with;

#[test]
fn a_run_goes_on_with_parameters_at_another_place() {
    let base = with(BASE, &["model.layers=4", "recompute=Block", "train.steps=6"]);
    let streamed = ["offload.parameters=Host", "offload.resident_blocks=1", "offload.ring=2"];
    let streamed = with(&base, &streamed);
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let straight = [&base, &streamed]
        .iter()
        .zip(&folders)
        .map(|(sets, folder)| run(sets, 1, folder.path(), None))
        .collect::<Vec<RunLog>>();
    assert_goes_on_as(&straight[0], &straight[1], 0, "streamed");
    for (from, to) in [(0, &streamed), (1, &base)] {
        for step in [1, 3, 4] {
            let again = tempfile::tempdir().unwrap();
            let resumed = run(to, 1, again.path(), Some(open(folders[from].path(), step)));
            let what = format!("from {from} after step {step}");
            assert_goes_on_as(&straight[from], &resumed, step, &what);
        }
    }
}
