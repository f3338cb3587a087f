//! Loads of experts and balance losses.

use super::*;

#[test]
fn loads_and_shares_are_added_to_the_old_sums() {
    let mut rig = Rig::new(1);
    let z = noise(1, 4 * 4);
    let (offsets, logits) = (rig.put_ints(&OFFSETS), rig.put(Dtype::F32, (4, 4), &z));
    let (order, targets) = (rig.put_ints(&ORDER), rig.put_ints(&[5, -1, 0, -100]));
    let load = rig.put(Dtype::F64, (1, 4), &[10.0, 20.0, 30.0, 40.0]);
    let sums = rig.put(Dtype::F64, (1, 4), &[1.0, 2.0, 3.0, 4.0]);
    let op = |load, shares| Op::ExpertLoad { offsets, order, targets, logits, load, shares };
    rig.run(&op(load, Some(sums)));
    assert_eq!(rig.get(load), [13.0, 22.0, 30.0, 43.0]);
    let p: Vec<f64> = z.chunks(4).flat_map(softmax).collect();
    let want: Vec<f64> =
        (0..4).map(|e| (e + 1) as f64 + p.iter().skip(e).step_by(4).sum::<f64>()).collect();
    assert_close(&rig.get(sums), &want, 1e-6, 0.0);
    rig.run(&op(load, None));
    assert_eq!(rig.get(load), [16.0, 24.0, 30.0, 46.0]);
}

#[test]
fn tokens_of_no_document_are_no_load_and_have_no_share() {
    let mut rig = Rig::new(1);
    let z = noise(1, 4 * 4);
    let (offsets, logits) = (rig.put_ints(&OFFSETS), rig.put(Dtype::F32, (4, 4), &z));
    // The second token chose experts 0 and 1, and the last one 0 and 3.
    let (order, targets) = (rig.put_ints(&ORDER), rig.put_ints(&[5, PADDING, -1, PADDING]));
    let load = rig.put(Dtype::F64, (1, 4), &[0.0; 4]);
    let sums = rig.put(Dtype::F64, (1, 4), &[0.0; 4]);
    rig.run(&Op::ExpertLoad { offsets, order, targets, logits, load, shares: Some(sums) });
    assert_eq!(rig.get(load), [1.0, 1.0, 0.0, 2.0]);
    let p: Vec<Vec<f64>> = z.chunks(4).map(softmax).collect();
    let want: Vec<f64> = (0..4).map(|e| p[0][e] + p[2][e]).collect();
    assert_close(&rig.get(sums), &want, 1e-6, 0.0);
}

#[test]
fn a_balance_loss_has_its_value_and_its_slopes() {
    let (per_token, scale, factor) = (2usize, 3.0, 0.25);
    // The second row has no tokens.
    let counts = [4.0, 1.0, 3.0, 0.0, 0.0, 0.0, 0.0, 6.0, 2.0];
    let shares: Vec<f64> = (0..9).map(|i| 0.5 + 0.25 * f64::from(i)).collect();
    let loss = |shares: &[f64]| -> f64 {
        let rows = counts.chunks(3).zip(shares.chunks(3));
        let of_row = |(c, s): (&[f64], &[f64])| {
            let tokens = c.iter().sum::<f64>() / per_token as f64;
            if tokens > 0.0 { scale * inner(c, s) / (tokens * tokens) } else { 0.0 }
        };
        rows.map(of_row).sum()
    };
    let mut rig = Rig::new(1);
    let t_counts = rig.put(Dtype::F64, (3, 3), &counts);
    let t_shares = rig.put(Dtype::F64, (3, 3), &shares);
    let value = rig.put(Dtype::F64, (1, 1), &[100.0]);
    let grads = rig.out(Dtype::F32, (3, 3));
    let (counts, shares_of) = (t_counts, t_shares);
    let op = Op::BalanceLoss { counts, shares: shares_of, value, grads, per_token, scale, factor };
    rig.run(&op);
    assert_close(&rig.get(value), &[100.0 + loss(&shares)], 1e-12, 0.0);
    let slopes: Vec<f64> = differences(&shares, loss).iter().map(|d| factor * d).collect();
    assert_close(&rig.get(grads), &slopes, 1e-6, 1e-5);
}
