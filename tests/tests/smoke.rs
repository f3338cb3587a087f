use tests::run_inline;
#[test]
fn smoke() {
    for sets in [
        vec![],
        vec!["batch.global=2"],
        vec!["parallel.data=2"],
        vec!["parallel.tensor=2"],
        vec!["parallel.tensor=2", "parallel.data=2"],
        vec!["parallel.tensor=2", "parallel.data=2", "parallel.sequence=true"],
        vec!["parallel.data=2", "offload.optimizer=Device"],
        vec!["parallel.data=2", "offload.accumulate=Host"],
    ] {
        let ran = run_inline(&sets);
        let losses: Vec<_> = ran.steps.iter().map(|s| (s.loss, s.grad_norm)).collect();
        println!("{sets:?} {losses:?} {:?} {}", ran.evals, ran.outcome.state_hash);
    }
}
