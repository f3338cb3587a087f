//! Text of a [`GpuBox`] as a box file. A comment above each key says what was measured and how.

use super::gpu_box::{ConcurrentRates, GpuBox, Products};
use super::{BlockShape, CollectiveRate, ConcurrentUpdate, NodeMemory, Row};
use device::Dtype;
use files::output::Output;
use files::utc::Utc;
use predict::sim::{CHANNEL_SHARE, MEMORY_SHARE, nominal_link, nvlink_sum_share};
use std::fmt::Write as _;
use topology::{counted, format_bytes};

/// First words of every box file that this module writes.
const BEGINNING: &str = "// The GPUs of one machine, measured by `onebox bench --save-box`";
pub(crate) const OUTPUT: Output = Output { what: "box", beginning: BEGINNING };

/// Maximum columns of a comment.
const WIDTH: usize = 118;

impl GpuBox {
    /// Returns the box file. A rate times the simulator's share for its key is the measured rate.
    pub fn to_ron(&self) -> String {
        let mut text = Text::default();
        self.head(&mut text);
        text.line("(");
        text.indent = 4;
        let Self { gpu, gpus, .. } = self;
        text.key("name", &format!("{:?}", format!("{gpus}x {}, measured", gpu.name)));
        text.key("gpus", gpus);
        text.say(&format!(
            "What the driver tells of {}; free at the start it may be less.",
            if *gpus == 1 { "it" } else { "the GPU with the least" }
        ));
        text.key("gpu_memory", &format!("{:?}", gib(self.gpu_memory)));
        let nodes = self.copies.memory.len();
        text.key("numa_nodes", &nodes);
        text.say(&format!(
            "Free {} when this was measured.",
            if nodes == 1 { "for a process" } else { "on the node with the least" }
        ));
        text.key("node_memory", &format!("{:?}", gib(self.node_memory)));
        text.section("gpu", |text| self.gpu(text));
        text.section("host", |text| self.host(text));
        text.indent = 0;
        text.line(")");
        text.out
    }

    /// The figures that could not be measured, with their effect on a simulation.
    pub fn missing(&self) -> Option<String> {
        let why = self.together.as_ref().err().filter(|_| self.gpus > 1)?;
        Some(format!(
            "copies and sums of all GPUs at once are not measured: {why}; a simulation gives each GPU the link that \
             one GPU alone reached, and what goes between GPUs takes these links"
        ))
    }

    fn head(&self, text: &mut Text) {
        let day = Utc::now().name();
        let day = format!("{}-{}-{}", &day[..4], &day[4..6], &day[6..8]);
        text.line(&format!("{BEGINNING} on {day}."));
        if self.is_stand_in() {
            text.say(
                "THE DRIVER IS A STAND-IN WITHOUT A GPU, and all sizes are small: no figure in this file says anything about any \
                 machine.",
            );
        }
        let (version, gpu) = (env!("CARGO_PKG_VERSION"), &self.gpu);
        let nccl = match &self.nccl {
            Ok(version) => format!("NCCL {version}"),
            Err(why) => format!("no NCCL ({why})"),
        };
        text.say(&format!(
            "onebox {version}; {} x {}; driver for CUDA {}; {nccl}; {}.",
            self.gpus,
            gpu.name,
            self.driver,
            counted(self.cores, "core")
        ));
        text.say(
            "Rates are the fastest of 5 rounds after one that is not counted, or the median where that is said, as for products: a \
             GPU lowers its clock under load. The simulator \
             gives most keys a share of themselves, as of a data sheet's figure: what was measured is divided by that share, \
             so that a simulation has what was measured.",
        );
        text.say(
            "There is no `topology`: who shares links is not in this file, and every GPU has a link of its own. `lstopo \
             --whole-io box.xml` exports it, and `topology: \"box.xml\"` adds it; the rates of links and between GPUs \
             are then those of the export.",
        );
    }

    fn gpu(&self, text: &mut Text) {
        let [halves, wide] = &self.products;
        text.say(&format!("Measured: {}.", products(halves)));
        text.rate("gemm_tflops", halves.simulated_tflops.unwrap_or(halves.tflops));
        text.say(&format!("Measured: {}.", products(wide)));
        text.rate("fp32_tflops", wide.simulated_tflops.unwrap_or(wide.tflops));
        text.say(&format!(
            "Measured: onebox's kernel that adds one array of {} to another moves {:.2} GB/s; divided by {MEMORY_SHARE}.",
            format_bytes(self.bytes),
            self.streamed
        ));
        text.rate("memory_gb_per_s", self.streamed / MEMORY_SHARE);
        self.collectives(text);
        self.peers(text);
        text.say("What the driver tells.");
        text.key("processors", &self.gpu.processors);
        text.key("sm", &self.gpu.sm);
    }

    /// Comment about collectives by size and number of GPUs.
    fn collectives(&self, text: &mut Text) {
        let rates = match &self.collectives {
            Ok(rates) => rates,
            Err(_) if self.gpus < 2 => return,
            Err(why) => {
                text.say(&format!("Collectives by size are not measured: {why}."));
                return;
            }
        };
        let rate = |CollectiveRate { op, ranks, bytes, sent }: &CollectiveRate| {
            format!("{op} of {} on {ranks}: {sent:.2}", format_bytes(*bytes))
        };
        let rates: Vec<String> = rates.iter().map(rate).collect();
        text.say(&format!(
            "Measured: GB/s that each GPU sends, by size and number of GPUs: {}.",
            rates.join("; ")
        ));
    }

    fn peers(&self, text: &mut Text) {
        let sums = match &self.together {
            Ok(together) => together.sums,
            Err(_) if self.gpus < 2 => return,
            Err(why) => {
                text.say(&format!("Not measured, so `peer_gb_per_s` is left out: {why}."));
                return;
            }
        };
        let way = if self.nccl.is_ok() { "NCCL's" } else { "onebox's in-process" };
        let (size, gpus) = (format_bytes(self.bytes), counted(self.gpus, "GPU"));
        let measured =
            format!("Measured: {way} sums of {size} over {gpus} send {sums:.2} GB/s from each GPU");
        if sums > self.link() {
            let share = nvlink_sum_share(self.gpu.sm, self.gpus);
            text.say(&format!("{measured}; divided by {share}."));
            text.rate("peer_gb_per_s", sums / share);
        } else {
            text.say(&format!(
                "{measured}: no more than a link to the host. A simulation uses it as it is."
            ));
            text.rate("peer_gb_per_s", sums);
        }
    }

    /// GB/s of the slower copy direction of each GPU while all copy, or of one GPU alone.
    fn link(&self) -> f64 {
        let alone = self.copies.up.min(self.copies.down);
        self.together.as_ref().map_or(alone, |ConcurrentRates { up, down, .. }| up.min(*down))
    }

    /// GB/s that the channels of a node move in a step: `changed` in place, or what the update and copies
    /// move together. If there are several nodes, copies may use another node than the slowest.
    fn channels(&self, changed: f64) -> f64 {
        let ConcurrentUpdate { adam, copied } = &self.beside;
        match self.copies.memory.len() {
            1 => changed.min(adam.gb_per_s + copied),
            _ => changed,
        }
    }

    fn host(&self, text: &mut Text) {
        let slowest = self.copies.memory.iter().min_by(|a, b| a.rmw.total_cmp(&b.rmw));
        let size = format_bytes(self.bytes);
        if let Some(node) = slowest {
            let NodeMemory { threads, read, write, copy, rmw, .. } = node;
            let threads = counted(threads, "thread");
            text.say(&format!(
                "Measured on the slowest node, {threads}, arrays of {size}, medians of 7: {rmw:.2} GB/s changed in place (read \
                 and written), {read:.2} read, {write:.2} written, {copy:.2} copied. The first, divided by {CHANNEL_SHARE}.",
            ));
            text.say(&format!(
                "Measured while a GPU copies {:.2} GB/s, both ways added: AdamW moves {:.2} GB/s. A step has both at once, so on one \
                 node the key is no more than their sum, divided by {CHANNEL_SHARE}.",
                self.beside.copied, self.beside.adam.gb_per_s
            ));
            text.rate("node_gb_per_s", self.channels(*rmw) / CHANNEL_SHARE);
        }
        // Caches may hold what one core updates, and a box refuses a core that is faster than its node.
        let node = slowest.map_or(f64::INFINITY, |node| self.channels(node.rmw) / CHANNEL_SHARE);
        let Self { adam, copies, core, .. } = self;
        let Row { params, path, gb_per_s, threads, .. } = adam;
        let (threads, share) = (counted(threads, "thread"), 100.0 * adam.share_of_ceiling);
        text.say(&format!(
            "Measured: AdamW of {params} parameters ({path}, fp32 states) moves {gb_per_s:.2} GB/s on {threads} of the slowest \
             node, {share:.0} % of the same traffic without arithmetic by the fastest loop ({}); STREAM's triad: {}. Divided by the threads: together they update as fast \
             as they did. One core alone changes an array of {size} in place with {:.2} GB/s, read and written.",
            adam.ceiling_loop,
            adam.triad_gb_per_s.map_or("not measured".to_owned(), |rate| format!("{rate:.2} GB/s")),
            core.rmw
        ));
        text.rate("core_gb_per_s", adam.gb_per_s_and_thread().min(node));
        text.key("cores", &self.cores);
        let ceiling = match copies.ceiling {
            Some(gb) => format!("; {} has {gb:.1}", copies.ceiling_is),
            None => String::new(),
        };
        text.say(&format!(
            "Measured: pinned copies of {size}, one GPU alone {:.2} GB/s up, {:.2} down, {:.2} both ways at once, \
             added{ceiling}.",
            copies.up, copies.down, copies.both
        ));
        if let Ok(ConcurrentRates { up, down, .. }) = self.together {
            let gpus = counted(self.gpus, "GPU");
            text.say(&format!(
                "Measured while all {gpus} copy: {up:.2} GB/s up, {down:.2} down, each."
            ));
        }
        let nominal = nominal_link(self.link() * 1e9) / 1e9;
        text.say(&format!("The slower way, divided by {:.2}.", self.link() / nominal));
        text.rate("link_gb_per_s", nominal);
    }
}

fn products(of: &Products) -> String {
    let Products { tflops, simulated_tflops, block, load, rounds, dtype } = of;
    let BlockShape { tokens, hidden, qkv, ffn } = block;
    let kind = match dtype {
        Dtype::Bf16 => "bf16",
        Dtype::F16 => "fp16",
        _ => "fp32",
    };
    let key = match simulated_tflops {
        Some(rate) => format!("with {rate:.4} a simulation of them takes as long"),
        None => {
            "a simulation of them takes longer with any rate, so this rate is the key".to_owned()
        }
    };
    format!(
        "{kind} products of a block with their gradients ({tokens} tokens, hidden {hidden}, {qkv} columns of queries, keys and \
         values, MLP {ffn}) reach {tflops:.4} TFLOPS, the median of {} in the second half of {load:.0} s under load; {key}",
        counted(rounds, "round")
    )
}

/// Formats bytes as GiB. The value is rounded down, since a larger size would not fit.
fn gib(bytes: u64) -> String {
    let hundredths = (u128::from(bytes) * 100) >> 30;
    match hundredths {
        0 => format!("{bytes}B"),
        _ => format!("{}.{:02}GiB", hundredths / 100, hundredths % 100),
    }
}

/// Text of a box file under construction.
#[derive(Default)]
struct Text {
    out: String,
    indent: usize,
}

impl Text {
    fn line(&mut self, line: &str) {
        let _ = writeln!(self.out, "{:1$}{line}", "", self.indent);
    }

    fn key(&mut self, key: &str, value: &impl std::fmt::Display) {
        self.line(&format!("{key}: {value},"));
    }

    /// Writes a rate with at least four digits, however small it is: a rate of 0 means unknown.
    fn rate(&mut self, key: &str, value: f64) {
        let digits = (3 - value.log10().floor() as i32).clamp(0, 12) as usize;
        self.line(&format!("{key}: {value:.digits$},"));
    }

    fn section(&mut self, name: &str, inside: impl FnOnce(&mut Self)) {
        self.line(&format!("{name}: ("));
        self.indent += 4;
        inside(self);
        self.indent -= 4;
        self.line("),");
    }

    /// Writes a comment.
    fn say(&mut self, words: &str) {
        let mut line = String::new();
        for word in words.split_whitespace() {
            if !line.is_empty() && self.indent + 4 + line.len() + word.len() > WIDTH {
                self.line(&format!("//{line}"));
                line.clear();
            }
            line += " ";
            line += word;
        }
        self.line(&format!("//{line}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bench::{Copies, NodeMemory, Row, TileCopies};
    use config::load_box;
    use device::cuda::GpuInfo;

    fn example(together: Result<ConcurrentRates, String>) -> GpuBox {
        let memory = |rmw| NodeMemory {
            node: Some(0),
            threads: 16,
            read: 210.0,
            write: 120.0,
            copy: 180.0,
            rmw,
        };
        let adam = |gb_per_s: f64| Row {
            path: "avx512",
            state: "fp32".into(),
            threads: 64,
            page_kib: 2048,
            params: 1 << 26,
            bytes_per_param: 28.0,
            seconds: 0.004,
            pass_seconds: 0.004,
            params_per_s: 1.6e10,
            gb_per_s,
            ceiling_gb_per_s: 460.0,
            ceiling_loop: "avx512, cached stores, no prefetches".into(),
            triad_gb_per_s: Some(430.0),
            share_of_ceiling: 0.98,
            rounds: 5,
        };
        let products = |tflops: f64, dtype| Products {
            tflops,
            simulated_tflops: Some(1.05 * tflops),
            block: BlockShape { tokens: 8192, hidden: 4096, qkv: 6144, ffn: 14_336 },
            load: 10.0,
            rounds: 400,
            dtype,
        };
        GpuBox {
            gpu: GpuInfo {
                ordinal: 0,
                name: "NVIDIA H100 80GB HBM3".into(),
                sm: 90,
                processors: 132,
                memory: 85_520_809_984,
                pci: None,
            },
            gpus: 4,
            gpu_memory: 85_520_809_984,
            driver: "12.8".into(),
            nccl: Ok("2.26.2".into()),
            node_memory: 500 << 30,
            cores: 64,
            products: [products(712.5, Dtype::Bf16), products(51.0, Dtype::F32)],
            streamed: 2680.0,
            copies: Copies {
                both_share: 1.0,
                parts: TileCopies::default(),
                device: "Cuda",
                bytes: 512 << 20,
                up: 55.0,
                down: 53.0,
                both: 90.0,
                ceiling: Some(63.0),
                ceiling_is: "the slowest link on the way, by its width and generation",
                memory: vec![memory(240.0), memory(232.0)],
            },
            together,
            collectives: Ok(vec![CollectiveRate {
                op: "all_reduce",
                ranks: 2,
                bytes: 16 << 20,
                sent: 123.4,
            }]),
            core: memory(15.0),
            beside: ConcurrentUpdate { adam: adam(300.0), copied: 80.0 },
            adam: adam(450.0),
            bytes: 512 << 20,
        }
    }

    fn load(text: &str) -> config::BoxConfig {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("here.ron");
        std::fs::write(&path, text).unwrap();
        load_box(&path).unwrap_or_else(|e| panic!("{e}\n{text}"))
    }

    #[test]
    fn a_simulation_gets_what_was_measured() {
        let text = example(Ok(ConcurrentRates { up: 48.0, down: 50.0, sums: 330.0 })).to_ron();
        let read = load(&text);
        let near = |key: f32, share: f64, measured: f64| {
            let is = f64::from(key) * share;
            assert!((is / measured - 1.0).abs() < 1e-3, "{is} for {measured} in\n{text}");
        };
        near(read.gpu.gemm_tflops, 1.0, 1.05 * 712.5);
        near(read.gpu.fp32_tflops, 1.0, 1.05 * 51.0);
        near(read.gpu.memory_gb_per_s, MEMORY_SHARE, 2680.0);
        near(read.gpu.peer_gb_per_s, nvlink_sum_share(90, 4), 330.0);
        near(read.host.link_gb_per_s, 0.85, 48.0);
        near(read.host.node_gb_per_s, CHANNEL_SHARE, 232.0);
        near(read.host.core_gb_per_s, 64.0, 450.0);
        assert_eq!((read.gpus, read.numa_nodes, read.host.cores), (4, 2, 64));
        assert!(text.contains("all_reduce of 16.00 MiB on 2: 123.40."), "{text}");
        // On one node, a step has no more than the update and the copies together.
        let mut of_one = example(Err("there is one GPU".into()));
        of_one.copies.memory.truncate(1);
        near(load(&of_one.to_ron()).host.node_gb_per_s, CHANNEL_SHARE, 240.0);
        of_one.beside.copied = -100.0;
        near(load(&of_one.to_ron()).host.node_gb_per_s, CHANNEL_SHARE, 200.0);
        assert_eq!((read.gpu.processors, read.gpu.sm), (132, 90));
        let lost = 85_520_809_984 - read.gpu_memory;
        assert!(lost < 11 << 20 && read.node_memory == 500 << 30, "{text}");
        assert!(!text.contains("STAND-IN") && text.starts_with(BEGINNING));
        assert!(text.lines().all(|line| line.len() <= 120), "{text}");
    }

    #[test]
    fn a_missing_figure_is_named_and_has_no_key() {
        let without = example(Err("GPU 2 is lost".into()));
        let text = without.to_ron();
        let read = load(&text);
        assert_eq!(read.gpu.peer_gb_per_s, 0.0);
        assert!(
            text.contains("Not measured, so `peer_gb_per_s` is left out: GPU 2 is lost."),
            "{text}"
        );
        assert!((f64::from(read.host.link_gb_per_s) * 0.85 / 53.0 - 1.0).abs() < 1e-3, "{text}");
        assert!(without.missing().unwrap().contains("GPU 2 is lost"));
        // Sums over PCIe are as fast as they were measured.
        let slow = example(Ok(ConcurrentRates { up: 48.0, down: 50.0, sums: 20.0 }));
        let text = slow.to_ron();
        let read = load(&text);
        assert_eq!((read.gpu.peer_gb_per_s, read.nvlink_gb_per_s()), (20.0, 0.0));
        assert!(text.contains("send 20.00 GB/s from each GPU: no more than a link"), "{text}");
        assert!(slow.missing().is_none());
    }

    #[test]
    fn a_rate_however_small_is_no_zero() {
        let mut text = Text::default();
        for rate in [7.654_32e-5, 0.123_456, 12.345_67, 98_765.4] {
            text.rate("r", rate);
        }
        assert_eq!(text.out, "r: 0.00007654,\nr: 0.1235,\nr: 12.35,\nr: 98765,\n");
        assert_eq!(gib(85_520_809_984), "79.64GiB");
        assert_eq!(gib(1000), "1000B");
    }
}
