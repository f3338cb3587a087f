//! The virtual clock. It advances from event to event, for every lane of every class of ranks.

use super::classes::{Classes, KINDS, Load, Users};
use super::program::{Node, Program, Ticks};
use super::share::{Flow, Scratch, share};
use super::submit::{self, Gate, QueueLimit, Release, ReleaseCause, Submitter};
use device::{Group, LANES};

/// An op in progress.
struct RunningOp {
    owner: Owner,
    load: usize,
    /// Seconds left at full speed.
    left: f64,
    speed: f64,
    start: f64,
}

/// The owner of an op.
#[derive(Clone, Copy)]
enum Owner {
    /// A queue of a class of ranks.
    Ranks { class: usize, queue: usize },
    /// A collective of a class of groups, on a queue of each member.
    Groups { class: usize, queue: usize },
}

/// The progress of one class of ranks through the program.
struct Player {
    /// Number of finished nodes of each queue, in the order of the queue.
    next: Vec<usize>,
    busy: Vec<bool>,
    /// Time of submission of each queue's next op, if the op waits for nothing else.
    wakes: [f64; LANES],
    done: Ticks,
    spans: Vec<Span>,
    submitter: Submitter,
}

/// The times of an op, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Span {
    pub(super) submitted: f64,
    pub(super) ready: f64,
    pub(super) start: f64,
    pub(super) end: f64,
}

/// The input of a simulation.
pub(super) struct Problem<'a> {
    pub(super) program: &'a Program,
    pub(super) users: &'a Users,
    pub(super) classes: &'a Classes,
    /// Queue of each lane of a rank. A queue of several lanes has the order of submission.
    pub(super) queues: [usize; LANES],
    /// Whether a thread submits; otherwise everything is submitted at the start.
    pub(super) submits: bool,
}

struct Solver<'a> {
    problem: Problem<'a>,
    /// Indexes of the nodes of each queue.
    queues: Vec<Vec<u32>>,
    /// Number of each node on its lane.
    ticks: Vec<u32>,
    /// Limit of the stream's queue at each node, if a thread submits.
    queue_limits: Vec<QueueLimit>,
    players: Vec<Player>,
    running: Vec<RunningOp>,
    loads: Vec<Load>,
    /// Load of each class of ranks, then of each class of groups, by work: an index into `loads`.
    load_of: Vec<Option<usize>>,
    /// Number of classes of members that have arrived, by class of groups and by queue.
    met: Vec<[usize; LANES]>,
    /// For each class of groups: seconds of a meeting of its threads, number of classes at the next
    /// collective, and time of the last arrival.
    threads: Vec<(f64, usize, f64)>,
    now: f64,
}

/// Simulates the program on all classes of ranks. Returns for each class the times of each node of
/// the program, and the releases of the class's thread. The simulation always ends: an op waits
/// only for ops submitted before it, and all ranks submit the same program.
pub(super) fn solve(problem: Problem<'_>) -> (Vec<Vec<Span>>, Vec<Vec<Release>>) {
    let mut solver = Solver::new(problem);
    solver.run();
    solver.players.into_iter().map(|player| (player.spans, player.submitter.releases)).unzip()
}

/// The index of a kind of group.
pub(super) const fn kind_number(group: Group) -> usize {
    match group {
        Group::Tp => 0,
        Group::Dp => 1,
        Group::World => KINDS - 1,
    }
}

impl<'a> Solver<'a> {
    fn new(problem: Problem<'a>) -> Self {
        let nodes = &problem.program.nodes;
        let mut queues = vec![Vec::new(); LANES];
        let (mut ticks, mut counts) = (Vec::with_capacity(nodes.len()), Ticks::default());
        for (index, node) in nodes.iter().enumerate() {
            queues[problem.queues[node.lane as usize]].push(index as u32);
            counts[node.lane as usize] += 1;
            ticks.push(counts[node.lane as usize]);
        }
        let queue_limits = if problem.submits {
            QueueLimit::of_nodes(problem.program, &ticks, &queues)
        } else {
            Vec::new()
        };
        let player = || Player {
            next: vec![0; LANES],
            busy: vec![false; LANES],
            wakes: [f64::INFINITY; LANES],
            done: Ticks::default(),
            spans: vec![Span::default(); nodes.len()],
            submitter: Submitter::new(if problem.submits { 0 } else { nodes.len() }),
        };
        let classes = problem.classes;
        let meeting = |group| classes.meeting_of(problem.users, group);
        let owners = classes.ranks() + classes.members.len();
        Self {
            players: (0..classes.ranks()).map(|_| player()).collect(),
            running: Vec::new(),
            loads: Vec::new(),
            load_of: vec![None; owners * problem.program.works.len()],
            met: vec![[0; LANES]; classes.members.len()],
            threads: (0..classes.members.len()).map(|g| (meeting(g), 0, 0.0)).collect(),
            now: 0.0,
            queue_limits,
            queues,
            ticks,
            problem,
        }
    }

    fn run(&mut self) {
        let mut scratch = Scratch::new(self.problem.classes.resources());
        (0..self.players.len()).for_each(|class| self.submit(class));
        loop {
            self.set_speeds(&mut scratch);
            let seconds = |r: &RunningOp| r.left / r.speed;
            let step = self.running.iter().map(seconds).fold(f64::INFINITY, f64::min);
            // The submission of the next op that waits for nothing else.
            let wakes = self.players.iter().flat_map(|player| player.wakes);
            let wake = wakes.fold(f64::INFINITY, f64::min);
            if step.is_infinite() && wake.is_infinite() {
                let over =
                    |player: &Player| (0..LANES).all(|q| player.next[q] == self.queues[q].len());
                assert!(self.players.iter().all(over), "ranks wait for each other in a circle");
                return;
            }
            // An op that would end within rounding of the next event ends with it.
            if self.now + step * (1.0 + 1e-9) < wake {
                self.now += step;
                self.end_what_is_over(step);
            } else {
                let step = wake - self.now;
                self.now = wake;
                self.end_what_is_over(step);
            }
            self.wake();
        }
    }

    fn end_what_is_over(&mut self, step: f64) {
        let mut over = Vec::new();
        self.running.retain_mut(|r| {
            let ends = r.left / r.speed <= step * (1.0 + 1e-9) + 1e-15;
            r.left -= step * r.speed;
            if ends {
                over.push((r.owner, r.start));
            }
            !ends
        });
        for (owner, start) in over {
            self.finish(owner, start);
        }
    }

    fn wake(&mut self) {
        for class in 0..self.players.len() {
            if self.players[class].wakes.iter().any(|wake| *wake <= self.now) {
                self.start_what_can(class);
            }
        }
    }

    /// Submits nodes until the thread of `class`, and the threads that it meets, must wait.
    fn submit(&mut self, class: usize) {
        let mut open = vec![class];
        while let Some(class) = open.pop() {
            while self.submit_next(class, &mut open) {}
            self.start_what_can(class);
        }
    }

    /// Submits the next node of `class`, if possible. Adds classes that can also continue to `met`.
    fn submit_next(&mut self, class: usize, met: &mut Vec<usize>) -> bool {
        let Problem { program, classes, .. } = self.problem;
        let player = &mut self.players[class];
        let index = player.submitter.next;
        let Some(node) = program.nodes.get(index) else { return false };
        let limit = &self.queue_limits[index];
        if !player.submitter.met && player.submitter.stops(&program.syncs, limit, &player.done) {
            return false;
        }
        let work = &program.works[node.work as usize];
        let group = work.kind.group().map(|group| classes.groups_of[class][kind_number(group)]);
        let meeting = group.map_or(0.0, |group| self.threads[group].0);
        if meeting > 0.0 && work.kind.is_on_streams() && !self.meet(class, group, met) {
            return false;
        }
        let player = &mut self.players[class];
        player.submitter.met = false;
        player.submitter.next += 1;
        player.submitter.clock += submit::seconds(work, node, meeting);
        player.spans[index].submitted = player.submitter.clock;
        true
    }

    /// Whether the threads of all classes of `group` have reached the next collective.
    fn meet(&mut self, class: usize, group: Option<usize>, met: &mut Vec<usize>) -> bool {
        let Some(group) = group else { return true };
        let members = &self.problem.classes.members[group];
        let submitter = &mut self.players[class].submitter;
        if members.len() < 2 || submitter.met {
            return true;
        }
        let (_, came, last) = &mut self.threads[group];
        (*came, *last) = (*came + 1, last.max(submitter.clock));
        if *came < members.len() {
            submitter.gate = Some(Gate::Peers);
            return false;
        }
        let last = std::mem::take(last);
        *came = 0;
        for &member in members {
            let submitter = &mut self.players[member].submitter;
            submitter.met = true;
            submitter.go_on(last, ReleaseCause::Class(class));
            if member != class {
                met.push(member);
            }
        }
        true
    }

    fn set_speeds(&mut self, scratch: &mut Scratch) {
        let flow = |r: &RunningOp| {
            let load = &self.loads[r.load];
            let Load { uses, dominant, side, .. } = load;
            Flow { load: uses, dominant: *dominant, side: *side, speed: 1.0 }
        };
        let mut flows: Vec<Flow<'_>> = self.running.iter().map(flow).collect();
        share(&mut flows, scratch);
        let speeds: Vec<f64> = flows.iter().map(|flow| flow.speed.max(1e-12)).collect();
        self.running.iter_mut().zip(speeds).for_each(|(r, speed)| r.speed = speed);
    }

    fn finish(&mut self, owner: Owner, start: f64) {
        let (members, queue) = match &owner {
            Owner::Ranks { class, queue } => (std::slice::from_ref(class), *queue),
            Owner::Groups { class, queue } => (&self.problem.classes.members[*class][..], *queue),
        };
        for &rank in members {
            self.end_op(rank, queue, start);
        }
        for &rank in members {
            self.go_on(rank);
        }
    }

    /// Continues after an op of `class` has finished.
    fn go_on(&mut self, class: usize) {
        let player = &mut self.players[class];
        if player.submitter.passes(&player.done, self.now) {
            return self.submit(class);
        }
        self.start_what_can(class);
    }

    fn end_op(&mut self, class: usize, queue: usize, start: f64) {
        let player = &mut self.players[class];
        let node = self.queues[queue][player.next[queue]] as usize;
        player.next[queue] += 1;
        player.busy[queue] = false;
        player.done[self.problem.program.nodes[node].lane as usize] = self.ticks[node];
        player.spans[node].start = start;
        player.spans[node].end = self.now;
    }

    fn start_what_can(&mut self, class: usize) {
        for queue in 0..LANES {
            let player = &mut self.players[class];
            player.wakes[queue] = f64::INFINITY;
            if player.busy[queue] {
                continue;
            }
            let Some(&index) = self.queues[queue].get(player.next[queue]) else { continue };
            let node = self.problem.program.nodes[index as usize];
            let waits = node.after.iter().zip(&player.done).any(|(after, done)| after > done);
            if waits || index as usize >= player.submitter.next {
                continue;
            }
            let submitted = player.spans[index as usize].submitted;
            if submitted > self.now {
                player.wakes[queue] = submitted;
                continue;
            }
            player.busy[queue] = true;
            player.spans[index as usize].ready = self.now;
            self.start(class, queue, node);
        }
    }

    fn start(&mut self, class: usize, queue: usize, node: Node) {
        let work = node.work as usize;
        let kind = self.problem.program.works[work].kind.group().map(kind_number);
        let Some(kind) = kind else {
            return self.play(Owner::Ranks { class, queue }, class, work);
        };
        let group = self.problem.classes.groups_of[class][kind];
        self.met[group][queue] += 1;
        if self.met[group][queue] == self.problem.classes.members[group].len() {
            self.met[group][queue] = 0;
            let owner = self.problem.classes.ranks() + group;
            self.play(Owner::Groups { class: group, queue }, owner, work);
        }
    }

    fn play(&mut self, owner: Owner, row: usize, work: usize) {
        let load = self.load(owner, row, work);
        // At least 1e-12, so that the clock advances and every op takes some time.
        let left = self.loads[load].alone.max(1e-12);
        self.running.push(RunningOp { owner, load, left, speed: 1.0, start: self.now });
    }

    /// The index of a load, which is computed once for each class and work.
    fn load(&mut self, owner: Owner, row: usize, work: usize) -> usize {
        let slot = row * self.problem.program.works.len() + work;
        if let Some(load) = self.load_of[slot] {
            return load;
        }
        let Problem { users, classes, .. } = self.problem;
        let load = match owner {
            Owner::Ranks { class, .. } => classes.rank_load(users, class, work),
            Owner::Groups { class, .. } => classes.group_load(users, class, work),
        };
        self.loads.push(load);
        self.load_of[slot] = Some(self.loads.len() - 1);
        self.loads.len() - 1
    }
}
