"""Reads the event files of a run with TensorBoard's own reader and compares every curve with metrics.jsonl. See check-tensorboard."""

import json
import math
import pathlib
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

STEP = {
    "loss/train": "loss",
    "optimizer/learning_rate": "lr",
    "optimizer/gradient_norm": "grad_norm",
    "optimizer/loss_scale": "loss_scale",
    "optimizer/skipped_steps": "skipped_total",
    "speed/tokens_per_second": "tokens_per_second",
    "speed/step_seconds": "step_seconds",
    "memory/device_bytes": "device_memory",
    "memory/host_bytes": "host_memory",
}
EPOCH = {"progress/epoch": "epoch"}
EVAL = {"loss/eval": "loss"}


def f32(number):
    return struct.unpack("<f", struct.pack("<f", number))[0]


def main():
    run = pathlib.Path(sys.argv[1])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    events = EventAccumulator(str(run), size_guidance={SCALARS: 0, TENSORS: 0})
    events.Reload()
    found = events.Tags()[SCALARS]
    # Samples that are drawn at random make no epochs.
    steps = STEP | EPOCH if any("epoch" in line for line in lines) else STEP
    expected = sorted(steps | EVAL)
    assert sorted(found) == expected, f"{run} has the curves {found}, not {expected}"
    for curves, kind in [(steps, "step"), (EVAL, "eval")]:
        of_kind = [line for line in lines if line["kind"] == kind]
        assert of_kind, f"{run} has no line of kind {kind}"
        for tag, key in curves.items():
            read = []
            for scalar in events.Scalars(tag):
                point = scalar.step, scalar.value
                # A run that goes on repeats the evaluation after the step it goes on from.
                if not read or kind == "step" or point != read[-1]:
                    read.append(point)
            # What is not finite is null there.
            read = [(step, value if math.isfinite(value) else None) for step, value in read]
            written = [(line["step"], None if line[key] is None else f32(line[key])) for line in of_kind]
            assert read == written, f"{run}: {tag} is {read} for TensorBoard, and {written} in metrics.jsonl"
    all_settings = [line["config"] for line in lines if line["kind"] == "config"]
    settings = all_settings[-1]
    text = events.Tensors("config/text_summary")[-1].tensor_proto.string_val[0].decode()
    assert f"steps: {settings['train']['steps']:_}," in text or f"steps: {settings['train']['steps']}," in text, text
    start = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    hparams = HParamsPluginData.FromString(start).session_start_info.hparams
    # TensorBoard keeps the first summary of a run.
    assert hparams["train.steps"].number_value == all_settings[0]["train"]["steps"], hparams
    assert hparams["precision"].string_value == all_settings[0]["precision"], hparams
    print(f"{run}: {len(expected)} curves of {len(lines)} lines are the same for TensorBoard and in metrics.jsonl")


if __name__ == "__main__":
    main()
