//! Single products, passes of attention, collectives, copies and kernels.

use super::{Bound, ClassRatios, bound, boxes, check, rows, table};
use config::{BoxConfig, Config, DeviceConfig};
use device::{
    Arena, Dropout, Dtype, Epilogue, Group, Heads, Lane, Op, Plan, Rank, Reduction, Scores, Tensor,
};
use predict::sim::{Hardware, record, simulate};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use topology::HostBytes;

const PARTS: &str = include_str!("parts.csv");

/// Hardware of `ranks` GPUs of a box, with a library of attention.
fn hardware(described: &BoxConfig, ranks: usize, attention: &str) -> Hardware {
    let ron = format!(
        "(device: Sim(box: \"dgx-h100\"), model: (layers: 1, hidden: 1024, heads: 16, seq_len: 64), parallel: (data: {ranks}),
          attention: {attention}, batch: (micro: 1, global: {ranks}), data: (train: \"tokens.bin\"), train: (steps: 1))"
    );
    let loaded = config::load_str(&ron, "part.ron", Path::new("."), &[]);
    let mut config: Config = loaded.unwrap_or_else(|e| panic!("{e}")).config;
    if let DeviceConfig::Sim { box_, .. } = &mut config.device {
        **box_ = described.clone();
    }
    predict::simulate::hardware(&config, HostBytes::default()).unwrap_or_else(|e| panic!("{e}"))
}

/// Seconds of the one op of `lane` that `op` makes from tensors.
fn seconds(
    hardware: &Hardware,
    ranks: usize,
    lane: Lane,
    op: impl FnOnce(&mut dyn FnMut(Arena, Dtype, (usize, usize)) -> Tensor) -> Vec<Op>,
) -> f64 {
    let (mut plan, mut all) = (Plan::default(), Vec::new());
    let ops = op(&mut |arena, dtype, shape| {
        let name = format!("tensor {}", all.len());
        let tensor = plan.tensor((arena, "part"), name, dtype, shape);
        all.push(tensor);
        tensor
    });
    let rank = Rank { tp: 0, tp_size: 1, dp: 0, dp_size: ranks };
    let program = record(rank, &Arc::new(plan), false, |dev| {
        dev.begin_step(1);
        ops.into_iter().for_each(|op| dev.submit(lane, op));
        dev.sync_all()
    });
    let timeline = simulate(program.unwrap(), hardware, 1, ranks, true);
    timeline.busy(0, lane)
}

/// Rate of a part in its unit: TFLOPS or GB/s.
fn rate(described: &BoxConfig, what: &str) -> f64 {
    let words: Vec<&str> = what.split(' ').collect();
    let number = |at: usize| words[at].parse::<usize>().unwrap_or_else(|e| panic!("{what}: {e}"));
    let of_one = |attention| hardware(described, 1, attention);
    match words[0] {
        "matmul" => matmul(&of_one("Own"), words[1], [number(2), number(3), number(4)]),
        "attention" => {
            let [samples, count, kv_count, seq_len, dim] = [3, 4, 5, 6, 7].map(number);
            let heads = Heads { count, kv_count, first: 0, total: count, seq_len };
            attention(&of_one(words[1]), words[2], samples, heads, dim)
        }
        "copy" => {
            let n = 1 << 28;
            let lane = if words[1] == "up" { Lane::H2d } else { Lane::D2h };
            let took = seconds(&of_one("Own"), 1, lane, |tensor| {
                let host = tensor(Arena::Pinned, Dtype::F32, (1, n));
                let gpu = tensor(Arena::Device, Dtype::F32, (1, n));
                let (src, dst) = if lane == Lane::H2d { (host, gpu) } else { (gpu, host) };
                vec![Op::Copy { src, dst }]
            });
            4.0 * n as f64 / took / 1e9
        }
        "add" => {
            let n = 1 << 28;
            let took = seconds(&of_one("Own"), 1, Lane::Compute, |tensor| {
                let [x, into] = [(); 2].map(|()| tensor(Arena::Device, Dtype::F32, (1, n)));
                vec![Op::Add { x, into }]
            });
            12.0 * n as f64 / took / 1e9
        }
        op => bus(described, op, number(1), number(2)),
    }
}

fn matmul(hardware: &Hardware, dtype: &str, [m, n, k]: [usize; 3]) -> f64 {
    let took = seconds(hardware, 1, Lane::Compute, |tensor| {
        let mut gpu = |dtype, shape| tensor(Arena::Device, dtype, shape);
        let c = gpu(Dtype::Bf16, (m, n));
        if dtype == "E4m3" {
            let (a, b) = (gpu(Dtype::E4m3, (m, k)), gpu(Dtype::E4m3, (n, k)).t());
            let scales = [(); 2].map(|()| gpu(Dtype::F32, (1, 1)));
            return vec![Op::ScaledGemm { a, b, c, bias: None, scales }];
        }
        let (a, b) = (gpu(Dtype::Bf16, (m, k)), gpu(Dtype::Bf16, (k, n)));
        vec![Op::Gemm { a, b, c, bias: None, add: false, epilogue: Epilogue::None }]
    });
    2.0 * (m * n * k) as f64 / took / 1e12
}

/// TFLOPS of half a square of scores, in a pass or in both.
fn attention(hardware: &Hardware, pass: &str, samples: usize, heads: Heads, dim: usize) -> f64 {
    let tokens = samples * heads.seq_len;
    let took = seconds(hardware, 1, Lane::Compute, |tensor| {
        let mut gpu = |dtype, shape| tensor(Arena::Device, dtype, shape);
        let wide = (tokens, (heads.count + 2 * heads.kv_count) * dim);
        let (qkv, d_qkv) = (gpu(Dtype::Bf16, wide), gpu(Dtype::Bf16, wide));
        let [out, d_out] = [(); 2].map(|()| gpu(Dtype::Bf16, (tokens, heads.count * dim)));
        let lse = gpu(Dtype::F32, (samples, heads.count * heads.seq_len));
        let (starts, dropout) = (None, Dropout { p: 0.0, key: 0, first_row: 0 });
        let scores = Scores::of(dim);
        let forward = Op::Attention { qkv, out, lse, heads, starts, dropout, scores };
        let backward =
            Op::AttentionBackward { qkv, out, lse, d_out, d_qkv, heads, starts, dropout, scores };
        match pass {
            "forward" => vec![forward],
            "backward" => vec![backward],
            _ => vec![forward, backward],
        }
    });
    let square = (samples * heads.count * dim) as f64 * (heads.seq_len * heads.seq_len) as f64;
    let products = match pass {
        "forward" => 2.0,
        "backward" => 5.0,
        _ => 7.0,
    };
    products * square / took / 1e12
}

/// NCCL's bus bandwidth in GB/s of a collective of `mib` MiB.
fn bus(described: &BoxConfig, op: &str, ranks: usize, mib: usize) -> f64 {
    let (bytes, group) = (mib << 20, Group::Dp);
    let took = seconds(&hardware(described, ranks, "Own"), ranks, Lane::DpComm, |tensor| {
        let x = tensor(Arena::Device, Dtype::Bf16, (1, bytes / 2));
        vec![match op {
            "all_reduce" => Op::AllReduce { x, group, reduce: Reduction::Sum },
            "all_gather" => Op::AllGather { x, group },
            "reduce_scatter" => Op::ReduceScatter { x, group },
            other => panic!("{other} is no part"),
        }]
    });
    let rounds = if op == "all_reduce" { 2.0 } else { 1.0 };
    rounds * (ranks - 1) as f64 / ranks as f64 * bytes as f64 / took / 1e9
}

#[test]
fn parts_of_steps_are_simulated_as_they_were_measured() {
    let mut classes: BTreeMap<&str, ClassRatios> = BTreeMap::new();
    for row in rows(PARTS) {
        let mut described = boxes::described(row["box"], "");
        if row["class"] == "NCCL over PCIe without a rate of the box" {
            described.gpu.peer_gb_per_s = 0.0;
            described.gpus = 8;
        }
        let measured: f64 = row["measured"].parse().unwrap();
        let simulated = rate(&described, row["what"]);
        println!(
            "{:5.3} {:5} {} | {} {} {}: {simulated:.1} of {measured}",
            simulated / measured,
            row["before"],
            row["class"],
            row["use"],
            row["box"],
            row["what"]
        );
        let class = classes.entry(row["class"]).or_default();
        class.now.push(simulated / measured);
        class.before.extend(row["before"].parse::<f64>());
    }
    println!("{}", table(&classes));
    check(&classes, BOUNDS, true);
}

/// Bounds of the errors by class. Beside each: the number of rows, and the geometric mean and the ends of
/// simulated over measured speed on 2026-11-27.
const BOUNDS: &[Bound] = &[
    // 6 rows: 1.15; 0.98 to 1.54.
    bound("DeepGEMM in fp8 with block scales", [1.13, 1.18], [0.96, 1.56]),
    // 24 rows: 0.64; 0.53 to 0.83.
    bound("FlashAttention-2 beside own attention", [0.62, 0.67], [0.51, 0.86]),
    // 3 rows: 0.99; 0.93 to 1.05.
    bound("FlashAttention-3 beside cuDNN", [0.97, 1.02], [0.90, 1.08]),
    // 22 rows: 0.99; 0.89 to 1.01.
    bound("NCCL on NVLink: A100", [0.96, 1.01], [0.86, 1.04]),
    // 21 rows: 1.05; 0.99 to 1.80.
    bound("NCCL on NVLink: B200", [1.02, 1.07], [0.97, 1.82]),
    // 45 rows: 0.99; 0.92 to 1.07.
    bound("NCCL on NVLink: H100 and H200", [0.97, 1.02], [0.89, 1.10]),
    // 42 rows: 1.52; 0.79 to 7.75. The host decides.
    bound("NCCL over PCIe without a rate of the box", [1.50, 1.55], [0.77, 7.80]),
    // 6 rows: 0.99; 0.98 to 1.00.
    bound("attention on an H200: Cudnn", [0.96, 1.01], [0.95, 1.03]),
    // 6 rows: 0.99; 0.96 to 1.02.
    bound("attention on an H200: Own", [0.97, 1.02], [0.94, 1.05]),
    // 12 rows: 0.97; 0.86 to 1.01.
    bound("matmuls of onebox on an H200 in bf16", [0.94, 0.99], [0.84, 1.04]),
    // 6 rows: 0.97; 0.93 to 1.01.
    bound("matmuls of onebox on an H200 in fp8", [0.94, 0.99], [0.91, 1.03]),
    // 1 rows: 0.90; 0.90 to 0.90.
    bound("matmuls with long sums", [0.88, 0.93], [0.88, 0.93]),
    // 5 rows: 1.00; 0.96 to 1.06.
    bound("pinned copies", [0.98, 1.03], [0.94, 1.08]),
    // 3 rows: 0.97; 0.91 to 1.03.
    bound("sums of two arrays", [0.95, 1.00], [0.88, 1.06]),
];
