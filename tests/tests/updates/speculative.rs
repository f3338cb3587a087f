//! Speculative updates have the bits of `Serial`, whether the decision is the predicted one in
//! every step, in some steps or in none.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test")]
#![allow(clippy::allow_attributes, reason = "the line above")]

mod by_hand;
mod drawn;

use engine::run::SpeculationOutcome;
use tests::RunRecord;
use tests::compare::{assert_same_bits, full, run_sets, run_with, with, with_delays};

const SPECULATIVE: &str = "offload.update=Speculative";
const SERIAL: &str = "offload.update=Serial";

/// Settings of all runs: dropout, and evaluations between updates.
const BASE: &[&str] = &[
    "model.vocab=257",
    "model.dropout=0.1",
    "train.steps=7",
    "train.eval_every=3",
    "train.eval_batches=2",
    "offload.tile_elements=1024",
    "offload.speculated_fraction=1",
];

const LAYOUTS: [&[&str]; 11] = [
    &[],
    &["parallel.tensor=2", "parallel.data=2"],
    &["parallel.data=2", "batch.micro=1", "offload.accumulate=Device"],
    &["parallel.tensor=2", "parallel.sequence=true", "batch.micro=1", "offload.accumulate=Host"],
    &["batch.micro=1", "offload.accumulate=Host", "offload.first_forward=2", "recompute=Block"],
    &["offload.optimizer=Split(device_fraction: 0.4)", "batch.micro=1", "parallel.data=2"],
    // Some segments that may have a speculative update are on the device.
    &["offload.optimizer=Split(device_fraction: 0.8)"],
    &["offload.optimizer=Split(device_fraction: 0.8)", "batch.micro=1", "offload.accumulate=Host"],
    &["offload.master=Split", "precision=Bf16"],
    &["offload.moments=Bf16", "precision=Bf16", "parallel.data=2"],
    &["offload.master=Split", "offload.moments=Bf16", "precision=Bf16", "batch.micro=1"],
];

/// Outcomes of the speculative updates, by step.
fn outcomes_by_step(ran: &RunRecord) -> Vec<SpeculationOutcome> {
    ran.steps.iter().map(|step| step.speculation).collect()
}

/// Clip limit at the median norm of the steps, so that some steps are clipped.
fn between(ran: &RunRecord) -> String {
    let mut norms: Vec<f64> = ran.steps.iter().map(|step| step.grad_norm).collect();
    norms.sort_by(f64::total_cmp);
    format!("optimizer.clip={}", norms[norms.len() / 2] as f32)
}

#[test]
fn it_has_the_bits_of_serial_where_all_some_or_no_steps_are_clipped() {
    for layout in LAYOUTS {
        let base = with(BASE, layout);
        let unclipped = run_sets(&with(&base, &[SERIAL, "optimizer.clip=None"]));
        let some = between(&unclipped);
        // This limit clips every step. The squares of the first few segments do not reach it, so
        // their updates are speculative and then repeated.
        let least = unclipped.steps.iter().map(|step| step.grad_norm).fold(f64::INFINITY, f64::min);
        let every = format!("optimizer.clip={}", (0.9 * least) as f32);
        let all = ["optimizer.clip=None", &every, &some];
        for clip in if full() || layout.len() < 3 { &all[..] } else { &all[2..] } {
            let clip = *clip;
            let serial = run_sets(&with(&base, &[SERIAL, clip]));
            let sets = with(&base, &[SPECULATIVE, clip]);
            let ran = run_sets(&sets);
            assert_same_bits(&serial, &ran, &format!("{sets:?}"));
            let is = outcomes_by_step(&ran);
            match clip {
                "optimizer.clip=None" => {
                    assert!(
                        is.iter().all(|step| *step == SpeculationOutcome::Committed),
                        "{sets:?}: {is:?}"
                    );
                }
                // After a few clipped steps, the run stops speculating.
                _ if clip == every => {
                    assert_eq!(is[0], SpeculationOutcome::Redone, "{sets:?}");
                    assert_eq!(is[6], SpeculationOutcome::None, "{sets:?}: {is:?}");
                }
                _ => {
                    let both = [SpeculationOutcome::Committed, SpeculationOutcome::Redone];
                    assert!(both.iter().all(|one| is.contains(one)), "{sets:?}: {is:?}");
                }
            }
            let half = run_sets(&with(&sets, &["offload.speculated_fraction=0.5"]));
            assert_same_bits(&serial, &half, &format!("half of {sets:?}"));
            if full() || layout.len() == 2 {
                let delayed = run_with(&sets, &with_delays(200));
                assert_same_bits(&serial, &delayed, &format!("delayed lanes of {sets:?}"));
            }
        }
    }
}

#[test]
fn steps_that_are_skipped_leave_everything_as_it_was() {
    let base = ["precision=Fp16", "loss_scale.initial=16777216", "loss_scale.hysteresis=1"];
    for layout in [&[][..], &["parallel.tensor=2", "parallel.data=2", "batch.micro=1"]] {
        let base = with(&with(BASE, &base), layout);
        let base = with(&base, &["train.steps=14"]);
        let serial = run_sets(&with(&base, &[SERIAL]));
        let ran = run_sets(&with(&base, &[SPECULATIVE]));
        assert_same_bits(&serial, &ran, &format!("{layout:?}"));
        let skipped = ran.steps.iter().filter(|step| step.skipped).count();
        assert!((1..14).contains(&skipped), "{skipped} steps are skipped");
        let dropped = ran
            .steps
            .iter()
            .filter(|step| step.skipped && step.speculation == SpeculationOutcome::Redone)
            .count();
        assert!(
            dropped > 0,
            "no update ahead of the decision is dropped: {:?}",
            outcomes_by_step(&ran)
        );
    }
}

/// One block, an own output projection, a rule without moments, other pieces and fractions.
#[test]
fn other_models_rules_and_shares_have_the_bits_of_serial() {
    let cases: [&[&str]; 6] = [
        &["model.layers=1", "optimizer.clip=None"],
        &["optimizer.kind=Sgd", "optimizer.lr=0.1", "optimizer.clip=1.5"],
        &["model.family=Llama", "parallel.tensor=2", "optimizer.clip=1.5"],
        &["offload.tile_elements=3000", "offload.bucket_elements=5000", "optimizer.clip=1.5"],
        &["offload.speculated_fraction=0", "optimizer.clip=None"],
        &["offload.speculated_fraction=0.2", "model.layers=5", "optimizer.clip=1.5"],
    ];
    for case in cases {
        let base = with(BASE, case);
        let serial = run_sets(&with(&base, &[SERIAL]));
        let ran = run_sets(&with(&base, &[SPECULATIVE]));
        assert_same_bits(&serial, &ran, &format!("{case:?}: {:?}", outcomes_by_step(&ran)));
    }
}
