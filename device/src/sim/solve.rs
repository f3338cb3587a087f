//! The virtual clock: from event to event, every lane of every class of ranks.

use super::classes::{Classes, KINDS, Load, Users};
use super::program::{Node, Program, Ticks};
use super::share::{Flow, share};
use crate::{Group, LANES};

/// An op in progress.
struct Running {
    owner: Owner,
    load: usize,
    /// Seconds left at full speed.
    left: f64,
    speed: f64,
    start: f64,
}

/// Whose op it is.
#[derive(Clone, Copy)]
enum Owner {
    /// Queue of a class of ranks.
    Ranks { class: usize, queue: usize },
    /// A collective of a class of groups, on a queue of each member.
    Groups { class: usize, queue: usize },
}

/// One class of ranks on its way through the program.
struct Player {
    /// By queue: nodes in order, and how many have started.
    next: Vec<usize>,
    busy: Vec<bool>,
    done: Ticks,
    spans: Vec<Span>,
}

/// When an op ran, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Span {
    pub(super) ready: f64,
    pub(super) start: f64,
    pub(super) end: f64,
}

/// What is simulated.
pub(super) struct Problem<'a> {
    pub(super) program: &'a Program,
    pub(super) users: &'a Users,
    pub(super) classes: &'a Classes,
    /// All lanes of a rank share one queue, in order of submission.
    pub(super) one_queue: bool,
}

struct Solver<'a> {
    problem: Problem<'a>,
    /// By queue: indexes of nodes.
    queues: Vec<Vec<u32>>,
    /// By node: its number on its lane.
    ticks: Vec<u32>,
    players: Vec<Player>,
    running: Vec<Running>,
    loads: Vec<Load>,
    /// Into `loads`: by work, by class of ranks, then of groups.
    load_of: Vec<Option<usize>>,
    /// By class of groups, by queue: how many classes of members have come.
    met: Vec<[usize; LANES]>,
    now: f64,
}

/// Plays the program on all classes. By class, by node: when it ran. It always ends: an op waits only for ops that were
/// submitted before it, and all ranks submit the same.
pub(super) fn solve(problem: Problem<'_>) -> Vec<Vec<Span>> {
    let mut solver = Solver::new(problem);
    solver.run();
    solver.players.into_iter().map(|player| player.spans).collect()
}

/// The number of a kind of group.
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
            let queue = if problem.one_queue { 0 } else { node.lane as usize };
            queues[queue].push(index as u32);
            counts[node.lane as usize] += 1;
            ticks.push(counts[node.lane as usize]);
        }
        let player = || Player {
            next: vec![0; LANES],
            busy: vec![false; LANES],
            done: Ticks::default(),
            spans: vec![Span::default(); nodes.len()],
        };
        let classes = problem.classes;
        let owners = classes.ranks() + classes.members.len();
        Self {
            players: (0..classes.ranks()).map(|_| player()).collect(),
            running: Vec::new(),
            loads: Vec::new(),
            load_of: vec![None; owners * problem.program.works.len()],
            met: vec![[0; LANES]; classes.members.len()],
            now: 0.0,
            queues,
            ticks,
            problem,
        }
    }

    fn run(&mut self) {
        let (mut left, mut grows) = {
            let n = self.problem.classes.resources();
            (vec![0.0; n], vec![0.0; n])
        };
        (0..self.players.len()).for_each(|class| self.start_what_can(class));
        while !self.running.is_empty() {
            self.set_speeds(&mut left, &mut grows);
            let seconds = |r: &Running| r.left / r.speed;
            let step = self.running.iter().map(seconds).fold(f64::INFINITY, f64::min);
            self.now += step;
            let mut over = Vec::new();
            self.running.retain_mut(|r| {
                // What would end within rounding of the next event ends with it.
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
    }

    fn set_speeds(&mut self, left: &mut [f64], grows: &mut [f64]) {
        let flow = |r: &Running| {
            let load = &self.loads[r.load];
            Flow { load: &load.uses, dominant: load.dominant, speed: 1.0 }
        };
        let mut flows: Vec<Flow<'_>> = self.running.iter().map(flow).collect();
        share(&mut flows, left, grows);
        let speeds: Vec<f64> = flows.iter().map(|flow| flow.speed.max(1e-12)).collect();
        self.running.iter_mut().zip(speeds).for_each(|(r, speed)| r.speed = speed);
    }

    fn finish(&mut self, owner: Owner, start: f64) {
        match owner {
            Owner::Ranks { class, queue } => {
                self.end_op(class, queue, start);
                self.start_what_can(class);
            }
            Owner::Groups { class, queue } => {
                let members = &self.problem.classes.members[class];
                for &rank in members {
                    self.end_op(rank, queue, start);
                }
                for &rank in members {
                    self.start_what_can(rank);
                }
            }
        }
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
            if player.busy[queue] {
                continue;
            }
            let Some(&index) = self.queues[queue].get(player.next[queue]) else { continue };
            let node = self.problem.program.nodes[index as usize];
            if node.after.iter().zip(&player.done).any(|(after, done)| after > done) {
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
        // Never 0, so that the clock moves and every op has a place in time.
        let left = self.loads[load].alone.max(1e-12);
        self.running.push(Running { owner, load, left, speed: 1.0, start: self.now });
    }

    /// Costs are looked up once per class and kind of work.
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
