//! Descriptors: attributes until they are finalized, and then what the attributes describe.
#![expect(unsafe_code, reason = "reads handles of descriptors from the caller's memory")]

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    sync::Arc,
};

use super::{
    Answer, EXECUTION_FAILED, NOT_SUPPORTED, Refusal,
    attributes::{Values, kind, name, of, rule},
    bad, content, demand,
    graph::{Action, Data, Fold, Graph, Mode, Operation, Place, Tensor},
    library_handle, live_descriptor, unsupported,
};
use crate::{failure::fails, machine::current_device, sync::lock};

/// `CUDNN_NUMERICAL_NOTE_TENSOR_CORE` and `CUDNN_NUMERICAL_NOTE_NONDETERMINISTIC`.
const ON_TENSOR_CORES: u64 = 0;
const NONDETERMINISTIC: u64 = 4;

/// `CUDNN_HEUR_MODE_FALLBACK` and `CUDNN_HEUR_MODE_A`.
const FALLBACK: u64 = 2;
const MODE_A: u64 = 3;

/// Whether this occurrence of `kind` on the bound GPU must fail.
fn fails_here(kind: &str) -> bool {
    current_device().is_ok_and(|device| fails(kind, device.ordinal))
}

/// An engine for a graph, with its numerical notes.
#[derive(Debug, Clone)]
pub(super) struct Engine {
    pub(super) graph: Arc<Graph>,
    notes: Vec<u64>,
}

impl Engine {
    /// Whether sums are in the same order in each run.
    pub(super) fn is_deterministic(&self) -> bool {
        !self.notes.contains(&NONDETERMINISTIC)
    }
}

/// What a finalized descriptor describes.
#[derive(Debug, Clone)]
pub(super) enum Content {
    /// A description that an operation refers to.
    Action(Action),
    Tensor(Arc<Tensor>),
    Operation(Arc<Operation>),
    Graph(Arc<Graph>),
    /// The engines that a heuristic proposes, best first.
    Heuristic(Vec<Engine>),
    EngineConfig(Engine),
    Engine(Engine),
    Plan(Engine),
    VariantPack(Arc<VariantPack>),
}

/// Addresses of a graph's tensors by number, and of the workspace; 0: none.
#[derive(Debug)]
pub(super) struct VariantPack {
    pub(super) addresses: BTreeMap<u64, usize>,
    pub(super) workspace: usize,
}

/// What the library answers for an attribute.
#[derive(Debug)]
pub(super) enum Reply {
    Numbers(Values),
    /// Contents for descriptors that the caller has made.
    Contents(Vec<Content>),
}

impl Reply {
    /// Writes the values, as far as the caller has room; returns their number.
    pub(super) fn write(&self, room: i64, values: *mut c_void) -> Answer<i64> {
        demand(!values.is_null(), || "no place for the values".into())?;
        let room = usize::try_from(room).unwrap_or(0);
        let contents = match self {
            Self::Numbers(numbers) => return numbers.write(room, values).map(|count| count as i64),
            Self::Contents(contents) => contents,
        };
        let written = contents.len().min(room);
        for (i, content) in contents[..written].iter().enumerate() {
            // SAFETY: the caller has `room` descriptors there.
            let raw = unsafe { values.cast::<*mut c_void>().add(i).read_unaligned() };
            lock(&*live_descriptor(raw)?).fill(content.clone())?;
        }
        Ok(written as i64)
    }
}

/// A descriptor of the library.
#[derive(Debug)]
pub(super) struct Descriptor {
    kind: c_int,
    attributes: BTreeMap<c_int, Values>,
    /// `None` until it is finalized.
    pub(super) content: Option<Content>,
}

impl Descriptor {
    pub(super) fn new(kind: c_int) -> Answer<Self> {
        match kind {
            kind::POINTWISE
            | kind::ENGINE
            | kind::ENGINE_CONFIG
            | kind::HEURISTIC
            | kind::PLAN
            | kind::OPERATION_POINTWISE
            | kind::GRAPH
            | kind::VARIANT_PACK
            | kind::TENSOR
            | kind::MATMUL
            | kind::OPERATION_MATMUL
            | kind::REDUCTION
            | kind::OPERATION_REDUCTION
            | kind::OPERATION_RESHAPE => {
                Ok(Self { kind, attributes: BTreeMap::new(), content: None })
            }
            _ => unsupported(format!("descriptors of kind {kind}")),
        }
    }

    pub(super) fn set(&mut self, name: c_int, values: Values) -> Answer {
        demand(self.content.is_none(), || "the descriptor is finalized".into())?;
        let Some((of, most)) = rule(self.kind, name) else {
            return unsupported(format!("attribute {name} of descriptors of kind {}", self.kind));
        };
        demand(values.of == of, || format!("attribute {name} has type {of}, not {}", values.of))?;
        let count = values.all.len();
        demand(count <= most, || format!("attribute {name} has {count} values, not {most}"))?;
        self.attributes.insert(name, values);
        Ok(())
    }

    /// Gives an empty descriptor the content that the library answers.
    pub(super) fn fill(&mut self, content: Content) -> Answer {
        let fits = matches!(
            (self.kind, &content),
            (kind::ENGINE_CONFIG, Content::EngineConfig(_)) | (kind::ENGINE, Content::Engine(_))
        );
        demand(fits, || format!("a descriptor of kind {} takes no such result", self.kind))?;
        self.content = Some(content);
        Ok(())
    }

    fn values(&self, name: c_int) -> Answer<&[u64]> {
        match self.attributes.get(&name) {
            Some(values) => Ok(&values.all),
            None => bad(format!("a descriptor of kind {} lacks attribute {name}", self.kind)),
        }
    }

    fn value(&self, name: c_int) -> Answer<u64> {
        self.values(name).map(|values| values[0])
    }

    fn flag(&self, name: c_int) -> bool {
        self.value(name).is_ok_and(|value| value != 0)
    }

    fn tensor(&self, name: c_int) -> Answer<Arc<Tensor>> {
        match content(self.value(name)? as *mut c_void)? {
            Content::Tensor(tensor) => Ok(tensor),
            _ => bad(format!("attribute {name} is no tensor")),
        }
    }

    fn action(&self, name: c_int) -> Answer<Action> {
        match content(self.value(name)? as *mut c_void)? {
            Content::Action(action) => Ok(action),
            _ => bad(format!("attribute {name} describes no operation")),
        }
    }

    /// Checks the attributes, and keeps what they describe.
    pub(super) fn finalize(&mut self) -> Answer {
        demand(self.content.is_none(), || "the descriptor is finalized".into())?;
        self.content = Some(match self.kind {
            kind::TENSOR => Content::Tensor(Arc::new(self.described_tensor()?)),
            kind::POINTWISE => {
                self.value(name::POINTWISE_PRECISION)?;
                let axis = self.value(name::POINTWISE_AXIS).ok().map(|axis| axis as usize);
                let mode = Mode::of(self.value(name::POINTWISE_MODE)?, axis)?;
                Content::Action(Action::Pointwise(mode))
            }
            kind::MATMUL => {
                self.demand_float(name::MATMUL_PRECISION)?;
                Content::Action(Action::Matmul)
            }
            kind::REDUCTION => {
                self.demand_float(name::REDUCTION_PRECISION)?;
                let fold = Fold::of(self.value(name::REDUCTION_OPERATOR)?)?;
                Content::Action(Action::Reduction(fold))
            }
            kind::OPERATION_POINTWISE
            | kind::OPERATION_MATMUL
            | kind::OPERATION_REDUCTION
            | kind::OPERATION_RESHAPE => Content::Operation(Arc::new(self.described_operation()?)),
            kind::GRAPH => Content::Graph(Arc::new(self.described_graph()?)),
            kind::HEURISTIC => Content::Heuristic(self.proposed_engines()?),
            kind::PLAN => Content::Plan(self.planned_engine()?),
            kind::VARIANT_PACK => Content::VariantPack(Arc::new(self.described_pack()?)),
            kind => return unsupported(format!("to finalize a descriptor of kind {kind}")),
        });
        Ok(())
    }

    fn demand_float(&self, name: c_int) -> Answer {
        match Data::of(self.value(name)?)? {
            Data::FLOAT => Ok(()),
            other => unsupported(format!("to compute in {other:?}")),
        }
    }

    fn described_tensor(&self) -> Answer<Tensor> {
        let axes = |name: c_int| -> Answer<[usize; 4]> {
            let values = self.values(name)?;
            let Ok(axes) = <[u64; 4]>::try_from(values) else {
                return unsupported(format!("tensors of {} axes", values.len()));
            };
            let positive = axes.iter().all(|value| (1..1 << 40).contains(value));
            demand(positive, || format!("sizes or strides {axes:?}"))?;
            Ok(axes.map(|value| value as usize))
        };
        let place = match (self.flag(name::TENSOR_IS_VIRTUAL), self.flag(name::TENSOR_IS_VALUE)) {
            (false, false) => Place::Memory,
            (true, false) => Place::Virtual,
            (false, true) => Place::Value,
            (true, true) => return bad("a virtual tensor has no value"),
        };
        let tensor = Tensor {
            number: self.value(name::TENSOR_NUMBER)?,
            data: Data::of(self.value(name::TENSOR_TYPE)?)?,
            sizes: axes(name::TENSOR_SIZES)?,
            strides: axes(name::TENSOR_STRIDES)?,
            place,
            alignment: self.value(name::TENSOR_ALIGNMENT)? as usize,
        };
        tensor.check()?;
        Ok(tensor)
    }

    fn described_operation(&self) -> Answer<Operation> {
        let (action, inputs, output) = match self.kind {
            kind::OPERATION_POINTWISE => {
                let inputs = [name::POINTWISE_X, name::POINTWISE_B, name::POINTWISE_T];
                let given = inputs.into_iter().filter(|name| self.attributes.contains_key(name));
                (self.action(name::POINTWISE_HOW)?, given.collect::<Vec<_>>(), name::POINTWISE_Y)
            }
            kind::OPERATION_MATMUL => {
                let inputs = vec![name::MATMUL_A, name::MATMUL_B];
                (self.action(name::MATMUL_HOW)?, inputs, name::MATMUL_C)
            }
            kind::OPERATION_REDUCTION => {
                (self.action(name::REDUCTION_HOW)?, vec![name::REDUCTION_X], name::REDUCTION_Y)
            }
            _ => (Action::Reshape, vec![name::RESHAPE_X], name::RESHAPE_Y),
        };
        let described = match action {
            Action::Pointwise(_) => kind::OPERATION_POINTWISE,
            Action::Matmul => kind::OPERATION_MATMUL,
            Action::Reduction(_) => kind::OPERATION_REDUCTION,
            Action::Reshape => kind::OPERATION_RESHAPE,
        };
        demand(described == self.kind, || format!("{action:?} describes another operation"))?;
        let inputs: Vec<Arc<Tensor>> =
            inputs.into_iter().map(|name| self.tensor(name)).collect::<Answer<_>>()?;
        let operation = Operation { action, inputs, output: self.tensor(output)? };
        operation.check()?;
        Ok(operation)
    }

    fn described_graph(&self) -> Answer<Graph> {
        library_handle(self.value(name::GRAPH_HANDLE)? as *mut c_void)?;
        let operations = self.values(name::GRAPH_OPERATIONS)?.iter();
        let operation = |raw: &u64| -> Answer<Arc<Operation>> {
            match content(*raw as *mut c_void)? {
                Content::Operation(operation) => Ok(operation),
                _ => bad("a graph has a part that is no operation"),
            }
        };
        Graph::new(operations.map(operation).collect::<Answer<_>>()?)
    }

    /// In mode A the best engine sums in no fixed order, and the second one does.
    fn proposed_engines(&self) -> Answer<Vec<Engine>> {
        let Content::Graph(graph) = content(self.value(name::HEURISTIC_GRAPH)? as *mut c_void)?
        else {
            return bad("a heuristic is for a graph");
        };
        let notes: &[&[u64]] = match self.value(name::HEURISTIC_MODE)? {
            MODE_A => &[&[ON_TENSOR_CORES, NONDETERMINISTIC], &[ON_TENSOR_CORES]],
            FALLBACK => &[&[]],
            mode => return unsupported(format!("heuristics of mode {mode}")),
        };
        if fails_here("heuristic") {
            let text = "the heuristic knows no engine (FAKECUDA_FAIL)".into();
            return Err(Refusal { status: NOT_SUPPORTED, text });
        }
        Ok(notes
            .iter()
            .map(|notes| Engine { graph: graph.clone(), notes: notes.to_vec() })
            .collect())
    }

    fn planned_engine(&self) -> Answer<Engine> {
        library_handle(self.value(name::PLAN_HANDLE)? as *mut c_void)?;
        let Content::EngineConfig(engine) = content(self.value(name::PLAN_CONFIG)? as *mut c_void)?
        else {
            return bad("a plan is for an engine's configuration");
        };
        if fails_here("plan") {
            let text = "the engine is not for this GPU (FAKECUDA_FAIL)".into();
            return Err(Refusal { status: EXECUTION_FAILED, text });
        }
        Ok(engine)
    }

    fn described_pack(&self) -> Answer<VariantPack> {
        let (numbers, addresses) =
            (self.values(name::PACK_NUMBERS)?, self.values(name::PACK_ADDRESSES)?);
        let counts = (numbers.len(), addresses.len());
        demand(counts.0 == counts.1, || format!("{} numbers, {} addresses", counts.0, counts.1))?;
        let workspace = self.value(name::PACK_WORKSPACE).unwrap_or(0) as usize;
        let pairs = numbers.iter().zip(addresses);
        let addresses: BTreeMap<u64, usize> =
            pairs.map(|(number, address)| (*number, *address as usize)).collect();
        demand(addresses.len() == counts.0, || "a tensor has two addresses".into())?;
        Ok(VariantPack { addresses, workspace })
    }

    /// What the library answers for an attribute of type `of`.
    pub(super) fn answer(&self, name: c_int, of: c_int) -> Answer<Reply> {
        let Some(content) = &self.content else { return bad("the descriptor is not finalized") };
        let (answers, reply) = match (content, name) {
            (Content::Heuristic(engines), name::HEURISTIC_RESULTS) => {
                let configs = engines.iter().cloned().map(Content::EngineConfig);
                (of::DESCRIPTOR, Reply::Contents(configs.collect()))
            }
            (Content::EngineConfig(engine), name::CONFIG_ENGINE) => {
                (of::DESCRIPTOR, Reply::Contents(vec![Content::Engine(engine.clone())]))
            }
            (Content::Engine(engine), name::ENGINE_NOTES) => {
                let (of, all) = (of::NUMERICAL_NOTE, engine.notes.clone());
                (of, Reply::Numbers(Values { of, all }))
            }
            (Content::Plan(engine), name::PLAN_WORKSPACE) => {
                let (of, all) = (of::INT64, vec![engine.graph.workspace() as u64]);
                (of, Reply::Numbers(Values { of, all }))
            }
            _ => return unsupported(format!("to ask for attribute {name} of kind {}", self.kind)),
        };
        demand(answers == of, || format!("attribute {name} has type {answers}, not {of}"))?;
        Ok(reply)
    }
}
