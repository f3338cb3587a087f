//! `onebox doctor`: shows what this machine can train on, and how to fix what is missing.

use super::{CommandError, code, print_as};
use data::{Cache, PartCount};
use device::cuda::{
    GpuInfo, GpuMemory, GpuOverhead, LibraryFile, LibraryInfo, Probe, free_memory, look,
    try_compiler,
};
use files::foreign_text::reason;
use files::path_text::ShownPath;
use layout::LocalMachine;
use layout::hardware_queues::few_queues;
use rustix::process::{Resource, getrlimit};
use serde::Serialize;
use serde_json::json;
use topology::{Machine, available_memory, cores, counted, format_bytes};

/// Bytes of available memory that even the quickstart needs.
const LEAST_MEMORY: u64 = 256 << 20;

/// Check what this machine has for training.
#[derive(Debug, clap::Args)]
pub(super) struct DoctorArgs {
    /// Require GPUs: also fail if the machine has none
    #[arg(long)]
    cuda: bool,
    /// One JSON document on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    Warn,
    Fail,
}

/// Result of one check.
#[derive(Debug, Serialize)]
struct Finding {
    verdict: Verdict,
    what: &'static str,
    text: String,
    remedy: Option<String>,
}

impl Finding {
    fn new(verdict: Verdict, what: &'static str, text: impl Into<String>) -> Self {
        Self { verdict, what, text: text.into(), remedy: None }
    }

    fn remedy(self, remedy: impl Into<String>) -> Self {
        Self { remedy: Some(remedy.into()), ..self }
    }
}

/// Prints the findings. A failed check sets the exit code.
pub(super) fn run(args: &DoctorArgs, local: &LocalMachine) -> Result<(), CommandError> {
    let probe = local.cuda();
    let machine = Machine::discover();
    let mut findings = cuda(probe);
    // Missing GPUs are a failure only if the machine is known to have some, or with `--cuda`.
    let has_gpus = probe.has_driver() || machine.as_ref().is_ok_and(|m| !m.gpus.is_empty());
    if !args.cuda && !has_gpus {
        let failed = findings.iter_mut().filter(|f| f.verdict == Verdict::Fail);
        failed.for_each(|finding| finding.verdict = Verdict::Warn);
    }
    findings.extend(host(probe, machine.as_ref()));
    let fails = |f: &Finding| f.verdict == Verdict::Fail;
    let trains_on = if probe.missing().is_none() { &["Cuda", "Cpu"][..] } else { &["Cpu"] };
    let ok = !findings.iter().any(fails);
    let document = json!({ "ok": ok, "trains_on": trains_on, "findings": findings });
    print_as(args.json, &document, || report(&findings, probe))?;
    if findings.iter().any(|f| f.what == HOST_MEMORY && fails(f)) {
        return Err(CommandError::silent(code::HOST_MEMORY));
    }
    if ok { Ok(()) } else { Err(CommandError::silent(code::UNFIT)) }
}

fn report(findings: &[Finding], probe: &Probe) -> String {
    let mut out = String::new();
    for Finding { verdict, what, text, remedy } in findings {
        let verdict = match verdict {
            Verdict::Ok => "ok  ",
            Verdict::Warn => "warn",
            Verdict::Fail => "fail",
        };
        out += &format!("{verdict}  {what:<12}  {text}\n");
        if let Some(remedy) = remedy {
            out += &format!("                    {remedy}\n");
        }
    }
    out += match probe.missing() {
        None => "\nthis machine trains on its GPUs (`device: Cuda`) and on virtual ones (`Cpu`)\n",
        Some(_) => {
            "\nthis machine trains on virtual GPUs (`device: Cpu`); `device: Cuda` is refused\n"
        }
    };
    out
}

const HOST_MEMORY: &str = "host memory";
const DATA_CACHE: &str = "data cache";

fn cuda(probe: &Probe) -> Vec<Finding> {
    let driver = match &probe.driver {
        Ok(version) => {
            let file = probe.driver_file.as_deref().map(|path| format!(", {}", path.shown()));
            let text = format!("for CUDA {version}{}", file.unwrap_or_default());
            Finding::new(Verdict::Ok, "driver", text)
        }
        Err(why) => Finding::new(Verdict::Fail, "driver", why).remedy(
            "install NVIDIA's driver, R525 or newer; in a container, start it with its GPUs",
        ),
    };
    let mut findings = vec![driver];
    findings.extend(probe.gpus.iter().map(gpu_finding));
    if probe.driver.is_ok() && probe.gpus.is_empty() {
        let none = Finding::new(Verdict::Fail, "GPU", "the driver sees none");
        findings.push(none.remedy("CUDA_VISIBLE_DEVICES hides GPUs that it does not name"));
    }
    findings.extend(probe.libraries.iter().map(library));
    findings.extend(compiler(probe));
    for (name, why, remedy) in probe.unfit_libraries() {
        findings.push(Finding::new(Verdict::Fail, name, why).remedy(remedy));
    }
    for (name, why, remedy) in probe.unfit_optional_libraries() {
        findings.push(Finding::new(Verdict::Warn, name, why).remedy(remedy));
    }
    if let Some(few) = few_queues().filter(|_| !probe.gpus.is_empty()) {
        findings.push(Finding::new(Verdict::Warn, "queues", few));
    }
    findings
}

fn gpu_finding(gpu: &GpuInfo) -> Finding {
    let GpuInfo { ordinal, name, sm, memory, .. } = gpu;
    let text = |free: &str| format!("{ordinal}: {name}, sm_{sm}, {}{free}", format_bytes(*memory));
    if *sm < 70 {
        return Finding::new(Verdict::Fail, "GPU", text("")).remedy("sm_70 (V100) is the oldest");
    }
    match look(*ordinal, offload::PROGRAMS) {
        Err(why) => match free_memory(*ordinal) {
            Ok(free) => {
                let free = format!(", {} free", format_bytes(free));
                Finding::new(Verdict::Warn, "GPU", text(&free))
                    .remedy(format!("what lies beside a plan could not be measured: {why}"))
            }
            Err(why) => Finding::new(Verdict::Fail, "GPU", text(&format!(": {why}"))),
        },
        Ok(GpuMemory { free, overhead, .. }) => {
            let GpuOverhead { products, kernels, streams } = overhead;
            let [free_text, products, kernels, streams] =
                [free, products, kernels, streams].map(format_bytes);
            let words = format!(
                ", {free_text} free; beside a plan: cuBLASLt {products}, and for each rank kernels {kernels}, streams \
                 and events {streams}"
            );
            let finding = |v| Finding::new(v, "GPU", text(&words));
            if free < memory / 2 {
                finding(Verdict::Warn).remedy("another process holds its memory: see nvidia-smi")
            } else {
                finding(Verdict::Ok)
            }
        }
    }
}

fn library(library: &LibraryInfo) -> Finding {
    let LibraryInfo { name, version, file, parts, required, .. } = library;
    match version {
        Ok(version) => {
            let mut text = version.clone();
            // The versions of the required libraries are those of CUDA.
            if let Some(cuda) = library.built_for().filter(|_| !required) {
                text += &format!(" for CUDA {cuda}");
            }
            if let Some(LibraryFile { path, place }) = file {
                text += &format!(", {} ({place})", path.shown());
            }
            for part in parts {
                text += &format!(", with {}", part.shown());
            }
            Finding::new(Verdict::Ok, name, text)
        }
        Err(why) if *required => Finding::new(Verdict::Fail, name, why).remedy(
            "install onebox's extra `cuda12` or `cuda13` with pip, or the CUDA toolkit (12 or 13), and set CUDA_HOME if it is not in /usr/local/cuda",
        ),
        Err(why) if *name == "cuDNN" => Finding::new(Verdict::Warn, name, why).remedy(
            "only `attention: Cudnn` needs it: onebox's extras `cuda12` and `cuda13` install it",
        ),
        Err(why) => Finding::new(Verdict::Warn, name, why).remedy(
            "without it GPUs exchange data by kernels that read each other's memory, if they can",
        ),
    }
}

/// Reports a compiler that was found and does not compile.
fn compiler(probe: &Probe) -> Option<Finding> {
    let unfit = probe.unfit_libraries();
    let found = probe.libraries.iter().find(|library| library.name == "NVRTC")?;
    if found.version.is_err() || unfit.iter().any(|(name, ..)| *name == found.name) {
        return None;
    }
    let why = try_compiler(probe).err()?;
    let why = reason(why.replace('\n', " "));
    let finding = Finding::new(Verdict::Fail, found.name, format!("an empty kernel: {why}"));
    Some(
        finding.remedy("install NVRTC with all of its files: libnvrtc-builtins lies in its folder"),
    )
}

fn host(probe: &Probe, machine: Result<&Machine, &topology::Error>) -> Vec<Finding> {
    let available = available_memory();
    let text = match available {
        u64::MAX => "unknown".to_owned(),
        bytes => format!("{} can be taken (cgroup limits counted)", format_bytes(bytes)),
    };
    let memory = if available < LEAST_MEMORY {
        Finding::new(Verdict::Fail, HOST_MEMORY, text)
            .remedy("end other processes, or raise the limit")
    } else {
        Finding::new(Verdict::Ok, HOST_MEMORY, text)
    };
    let nodes = match machine {
        Ok(machine) => {
            let (nodes, cores) = (machine.numa_nodes.len(), cores());
            let text = format!("{}, {}", counted(nodes, "node"), counted(cores, "hardware thread"));
            Finding::new(Verdict::Ok, "NUMA", text)
        }
        Err(error) => Finding::new(Verdict::Warn, "NUMA", format!("unknown: {error}"))
            .remedy("threads are not bound to cores"),
    };
    [memory, memlock(probe), nodes].into_iter().chain(cache()).collect()
}

/// Reports the size of the token cache and how to empty it; `None` if it has no folder.
fn cache() -> Option<Finding> {
    let cache = Cache::of_user(true);
    let folder = cache.folder.as_deref().filter(|folder| folder.is_dir())?;
    let path = folder.shown();
    let found =
        cache.limit().and_then(|limit| Ok((limit, cache.usage().map_err(|e| e.to_string())?)));
    let finding = match found {
        Ok((limit, usage)) => {
            let PartCount { parts, bytes } = usage.all;
            let (bytes, parts) = (format_bytes(bytes), counted(parts, "part"));
            let text = format!("{bytes} of at most {} in {parts} in {path}", format_bytes(limit));
            Finding::new(Verdict::Ok, DATA_CACHE, text)
        }
        Err(why) => Finding::new(Verdict::Warn, DATA_CACHE, format!("{path}: {why}")),
    };
    Some(finding.remedy("to empty it: onebox data cache --clear; runs make again what they need"))
}

/// Reports the memlock limit. The limit does not hold for memory that drivers pin; some containers
/// count this memory anyway.
fn memlock(probe: &Probe) -> Finding {
    match getrlimit(Resource::Memlock).current {
        None => Finding::new(Verdict::Ok, "memlock", "unlimited"),
        Some(bytes) => {
            let text = format!("limited to {}", format_bytes(bytes));
            if probe.missing().is_some() {
                return Finding::new(Verdict::Ok, "memlock", text + " (matters for GPUs only)");
            }
            Finding::new(Verdict::Warn, "memlock", text)
                .remedy("if pinning host memory fails: ulimit -l unlimited")
        }
    }
}
