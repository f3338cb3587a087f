//! `cudnnBackendExecute`: a plan's graph on a stream, with the addresses of a variant pack.
#![expect(unsafe_code, reason = "numbers of the host are given by address")]

use std::{
    collections::BTreeMap,
    ffi::{c_int, c_void},
    sync::atomic::Ordering::Relaxed,
};

use super::{
    Answer, EXECUTION_FAILED, Refusal, bad, content, demand,
    descriptor::{Content, Engine, VariantPack},
    graph::{Data, Place, Tensor},
    interpreter::Interpreter,
    library_handle,
};
use crate::{
    call::CallResult, config::config, counters::STATS, driver::memory::check_accessible,
    failure::fails, machine::stream, sync::lock, wrong::is_wrong,
};

/// Enqueues a plan. Numbers of the host are read before the call returns.
pub(super) fn enqueue(handle: *mut c_void, plan: *mut c_void, pack: *mut c_void) -> Answer {
    let handle = library_handle(handle)?;
    let Content::Plan(engine) = content(plan)? else { return bad("this is no plan") };
    let Content::VariantPack(pack) = content(pack)? else { return bad("this is no variant pack") };
    let failed = |code: c_int| Refusal {
        status: EXECUTION_FAILED,
        text: format!("the stream answers with the driver's error {code}"),
    };
    let stream = stream(*lock(&handle) as *mut c_void).map_err(failed)?;
    let values = check(&engine, &pack)?;
    if fails("graph", stream.device) {
        let text = "the graph does not start (FAKECUDA_FAIL)".into();
        return Err(Refusal { status: EXECUTION_FAILED, text });
    }
    STATS.graphs.add(1);
    stream.push(move |_| run(&engine, &pack, values));
    Ok(())
}

/// The numbers of the host by tensor, after a check that each tensor has its address.
fn check(engine: &Engine, pack: &VariantPack) -> Answer<BTreeMap<u64, f32>> {
    let given = &engine.graph.given;
    if let Some(number) = pack.addresses.keys().find(|number| !given.contains_key(*number)) {
        return bad(format!("the graph has no tensor {number} in memory"));
    }
    demand(pack.workspace != 0, || "the plan needs a workspace".into())?;
    let mut values = BTreeMap::new();
    for Tensor { number, place, alignment, .. } in given.values().map(|tensor| &**tensor) {
        let Some(address) = pack.addresses.get(number).filter(|address| **address != 0) else {
            return bad(format!("tensor {number} has no address"));
        };
        demand(*place == Place::Value || address.is_multiple_of(*alignment), || {
            format!("tensor {number} at {address:#x} is not aligned to {alignment} bytes")
        })?;
        if *place == Place::Value {
            // SAFETY: the address of a number of the host, by the C interface.
            values.insert(*number, unsafe { (*address as *const f32).read_unaligned() });
        }
    }
    Ok(values)
}

/// Computes the graph. The workspace is filled with NaN, so that no other array can lie in it. An
/// engine that is not deterministic changes the order of its sums in every other run.
fn run(engine: &Engine, pack: &VariantPack, mut values: BTreeMap<u64, f32>) -> CallResult {
    let graph = &engine.graph;
    for tensor in graph.given.values().filter(|tensor| tensor.place == Place::Memory) {
        let Data::Number(float) = tensor.data else { continue };
        let address = pack.addresses[&tensor.number];
        check_accessible("a tensor of a graph", address, tensor.span() * float.bytes())?;
    }
    let room = graph.workspace();
    check_accessible("the workspace of a graph", pack.workspace, room)?;
    if config().accounting {
        return Ok(());
    }
    // SAFETY: just checked.
    unsafe { (pack.workspace as *mut u8).write_bytes(0xFF, room) };
    if is_wrong("graph") {
        values.values_mut().for_each(|value| *value *= 2.0);
    }
    let even = graph.runs.fetch_add(1, Relaxed).is_multiple_of(2);
    let ascending = even || engine.is_deterministic();
    Interpreter::new(&pack.addresses, values, ascending).run(graph);
    Ok(())
}
