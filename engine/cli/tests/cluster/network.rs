//! A run on two machines whose link drops. The machines are namespaces of this machine: each has
//! its own name and network, and they share the file system.

use super::faults::{
    A_PROCESS, BASE, BLINKED, Fault, FaultAction, LINK, assert_named, assert_same_end, begin, copy,
    full, suffer_by,
};
use super::launch::{assert_whole, has_mpirun, mpirun, sets};
use crate::common::{CommandOutput, Folder};
use engine::run::FaultPoint;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const NEAR: usize = 0;
const FAR: usize = 1;
const NAMES: [&str; 2] = ["near", "far"];
const ADDRESSES: [&str; 2] = ["10.99.0.1", "10.99.0.2"];

/// Gives a new machine the name `$0`; it lives until its input ends. Its TCP gives up a silent peer
/// after 13 s instead of 15 minutes, because Open MPI's mpirun and daemons wait for that.
const MACHINE: &str = "hostname $0 && ip link set lo up && echo 5 >/proc/sys/net/ipv4/tcp_retries2 && echo up && exec cat";

struct Machine {
    /// The process that keeps the namespaces alive.
    keeper: Child,
    network: PathBuf,
}

/// Network namespace of a process.
fn network_of(id: &str) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{id}/ns/net")).ok()
}

impl Machine {
    fn start(mut unshare: Command, name: &str) -> Result<Self, String> {
        unshare.args(["--net", "--uts", "sh", "-c", MACHINE, name]);
        unshare.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let keeper = unshare.spawn();
        let mut keeper = keeper.map_err(|error| format!("{unshare:?}: {error}"))?;
        let mut line = String::new();
        let mut out = BufReader::new(keeper.stdout.take().unwrap());
        out.read_line(&mut line).unwrap();
        if line == "up\n" {
            let network = network_of(&keeper.id().to_string()).unwrap();
            return Ok(Self { keeper, network });
        }
        let mut why = String::new();
        keeper.stderr.take().unwrap().read_to_string(&mut why).unwrap();
        keeper.wait().unwrap();
        Err(format!("no namespaces for the machine {name}: {}", why.trim()))
    }

    fn id(&self) -> String {
        self.keeper.id().to_string()
    }

    /// Command that runs `program` on this machine.
    fn enter(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        command.args(["--preserve-credentials", "--user", "--net", "--uts", "--target"]);
        command.args([&self.id(), "--", program]);
        command
    }

    fn ip(&self, args: &[&str]) -> Result<(), String> {
        let done = self.enter("ip").args(args).output().unwrap();
        let why = || format!("ip {args:?}: {}", String::from_utf8_lossy(&done.stderr));
        done.status.success().then_some(()).ok_or_else(why)
    }

    /// Processes on this machine, except its keeper.
    fn processes(&self) -> Vec<String> {
        let all = std::fs::read_dir("/proc").unwrap().flatten();
        let all = all.filter_map(|entry| entry.file_name().into_string().ok());
        let here = all.filter(|id| network_of(id).as_ref() == Some(&self.network));
        here.filter(|id| *id != self.id()).collect()
    }
}

impl Drop for Machine {
    /// A failed test may leave processes.
    fn drop(&mut self) {
        let _ =
            Command::new("kill").arg("-9").args(self.processes()).stderr(Stdio::null()).status();
        let _ = self.keeper.kill();
        let _ = self.keeper.wait();
    }
}

struct Network {
    machines: [Machine; 2],
}

impl Network {
    /// Starts the network, or skips the test with a reason; fails if a required tool is missing.
    fn new() -> Option<Self> {
        match Self::start() {
            Ok(network) => Some(network),
            Err(why) => {
                // A missing tool can be installed, a kernel without namespaces cannot.
                let root = rustix::process::geteuid().is_root();
                let missing = root && std::env::var_os("CI").is_some() && why.starts_with("no ip");
                assert!(!missing, "{why}");
                println!("SKIPPED: {why}");
                None
            }
        }
    }

    fn start() -> Result<Self, String> {
        let ip = Command::new("ip").arg("-Version").output();
        ip.map_err(|error| format!("no ip (package iproute2): {error}"))?;
        // A user is root in a user namespace of his own.
        let mut unshare = Command::new("unshare");
        unshare.args(["--user", "--map-root-user"]);
        let near = Machine::start(unshare, NAMES[NEAR])?;
        let far = Machine::start(near.enter("unshare"), NAMES[FAR])?;
        let peer = ["type", "veth", "peer", "name", LINK, "netns", &far.id()];
        near.ip(&[&["link", "add", LINK], &peer[..]].concat())?;
        let network = Self { machines: [near, far] };
        for (machine, address) in network.machines.iter().zip(ADDRESSES) {
            machine.ip(&["address", "add", &format!("{address}/24"), "dev", LINK])?;
        }
        network.join()?;
        Ok(network)
    }

    /// Sets the link up.
    fn join(&self) -> Result<(), String> {
        self.machines.iter().try_for_each(|machine| machine.ip(&["link", "set", LINK, "up"]))
    }

    /// `program` with a process on each of `on`, in this order; mpirun is on the near machine.
    fn launch(&self, folder: &Folder, on: [usize; 2], program: &str, args: &[&str]) -> Command {
        let agent = folder.path("agent");
        // Replaces ssh; mpirun passes it a machine and a shell line.
        let enter = format!("nsenter --net --uts --target {}", self.machines[FAR].id());
        std::fs::write(&agent, format!("#!/bin/sh\nshift\nexec {enter} sh -c \"$*\"\n")).unwrap();
        std::fs::set_permissions(&agent, std::fs::Permissions::from_mode(0o755)).unwrap();
        let mut command = self.machines[NEAR].enter(&mpirun());
        command.args(["--bind-to", "none", "--mca", "btl", "self,tcp", "--mca", "plm_rsh_agent"]);
        command.arg(agent).current_dir(folder.path("")).env("TMPDIR", folder.path(""));
        command.envs([("OMPI_ALLOW_RUN_AS_ROOT", "1"), ("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")]);
        for (number, machine) in on.into_iter().enumerate() {
            command.args([":"].iter().take(number));
            command.args(["-n", "1", "--host", ADDRESSES[machine], program]).args(args);
        }
        command
    }

    /// Continues a run until the fault, if it occurs.
    fn suffer(&self, folder: &Folder, run: &str, set: &[&str], fault: Fault) -> CommandOutput {
        let program = std::env::current_exe().unwrap();
        // The victim is not on mpirun's machine.
        let on = if fault.victim == 1 { [NEAR, FAR] } else { [FAR, NEAR] };
        let command = self.launch(folder, on, program.to_str().unwrap(), &A_PROCESS);
        suffer_by(command, folder, 2, run, set, fault)
    }

    /// Continues the run to its end.
    fn go_on(&self, folder: &Folder, run: &str, set: &[&str]) {
        let set = sets(set);
        let words = ["train", "tiny.ron", "--run-dir", run, "--resume", "-q"];
        let words = words.into_iter().chain(set.iter().map(String::as_str));
        let words: Vec<&str> = words.collect();
        let onebox = env!("CARGO_BIN_EXE_onebox");
        let done = Folder::done(self.launch(folder, [NEAR, FAR], onebox, &words));
        assert_eq!(done.code, 0, "{}", done.stderr);
    }

    /// Asserts that no process of the run or of its launcher is left on any machine.
    fn assert_empty(&self) {
        for machine in &self.machines {
            let mut looks = 0;
            while let Some(id) = machine.processes().first() {
                looks += 1;
                let name = std::fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
                assert!(looks < 600, "process {id} is left: {name}");
                std::thread::sleep(Duration::from_millis(100));
            }
        }
    }
}

/// Processes and places of the cuts; every place in a full test.
fn cuts() -> Vec<(usize, FaultPoint)> {
    let all = FaultPoint::ALL.into_iter().enumerate();
    let all = all
        .map(|(number, place)| (if place == FaultPoint::Naming { 0 } else { number % 2 }, place));
    if full() { all.collect() } else { vec![(1, FaultPoint::Saved), (0, FaultPoint::Writing)] }
}

/// Two machines, and a folder with a begun run and its settings.
fn begun() -> Option<(Network, Folder, Vec<&'static str>)> {
    if !has_mpirun() {
        return None;
    }
    let network = Network::new()?;
    let folder = Folder::new();
    let set = [BASE, &["train.steps=4"]].concat();
    begin(&folder, &set);
    Some((network, folder, set))
}

#[test]
fn a_machine_that_is_cut_off_ends_all_and_costs_no_bit() {
    let Some((network, folder, set)) = begun() else { return };
    for (number, (victim, place)) in cuts().into_iter().enumerate() {
        let run = format!("run-{number}");
        copy(&folder.path("begun"), &folder.path(&run));
        let fault = Fault { how: FaultAction::Cut, victim, place: Some(place), time: 1 };
        let done = network.suffer(&folder, &run, &set, fault);
        assert_named(&done, fault);
        let ranks = if victim == 0 { "2 ranks (0 to 1)" } else { "2 ranks (2 to 3)" };
        let words = format!("from process {victim} on far, which has {ranks}");
        assert!(done.stderr.contains(&words), "no `{words}` in\n{}", done.stderr);
        network.assert_empty();
        assert_whole(&folder, &run);
        network.join().unwrap();
        network.go_on(&folder, &run, &set);
        assert_same_end(&folder, "straight", &run, &fault.to_string());
    }
}

#[test]
fn a_network_that_comes_back_before_the_deadline_costs_no_bit() {
    let Some((network, folder, set)) = begun() else { return };
    copy(&folder.path("begun"), &folder.path("run"));
    let fault =
        Fault { how: FaultAction::Blink, victim: 1, place: Some(FaultPoint::Step), time: 1 };
    let done = network.suffer(&folder, "run", &set, fault);
    assert_eq!(done.code, 0, "{}", done.stderr);
    assert!(done.stdout.contains(BLINKED), "{}", done.stdout);
    assert_same_end(&folder, "straight", "run", BLINKED);
}
