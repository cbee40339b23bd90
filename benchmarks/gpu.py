"""What a GPU is checked for, in one go. It has not been run on one yet.

    pip install -e '.[gpu,test]'
    python -m benchmarks.gpu

1. Every case of the conformance registry, on the GPU and then without it.
2. A and B against keras-rs and `keras.layers.Embedding`, on the GPU.
3. The operations of a training step that TensorFlow placed on the CPU, since
   they have no kernel for the GPU.

The last line is JSON.
"""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
#: Both share the GPU with nobody, but grow as needed.
os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")

import tensorflow as tf

from benchmarks import workloads
from benchmarks.comparison import check
from benchmarks.keras_contenders import KerasEmbedding, KerasRs
from benchmarks.tf_contenders import Ours, TensorFlowContender
from benchmarks.timing import interleave

ROOT = pathlib.Path(__file__).resolve().parent.parent
CASES = [
    "tests/conformance/test_default_device.py",
    "tests/conformance/test_default_device_xla.py",
]
#: They run on the host by design: constants, arguments, shapes.
HOST_OPERATIONS = {"Arg", "_Arg", "_Retval", "Const", "NoOp", "VarHandleOp"}


def run_registry(*, on_gpu: bool) -> str:
    """Pytest's last line."""
    hidden = {} if on_gpu else {"CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            *CASES,
        ],
        cwd=ROOT,
        env={**os.environ, **hidden},
        capture_output=True,
        text=True,
    )
    return (done.stdout.strip() or done.stderr.strip()).splitlines()[-1]


def finished(call: Callable[[], None]) -> Callable[[], None]:
    """A call that returns when the GPU is done."""

    def run() -> None:
        call()
        tf.test.experimental.sync_devices()

    return run


def compare(workload: workloads.Workload) -> list[dict[str, Any]]:
    """Training and forward, in turns."""
    makers = {
        one.title: lambda w, one=one: one(w, "adagrad")
        for one in (Ours, KerasRs, KerasEmbedding)
    }
    records = []
    for training in (True, False):
        check(makers, workload, training=training)
        calls = {
            title: finished(make(workload).calls(training=training))
            for title, make in makers.items()
        }
        timings = interleave(calls, rounds=15, warm_up=8)
        for title in calls:
            record = {
                "workload": workload.name,
                "mode": "train" if training else "forward",
                "contender": title,
                **timings.ratio(title, Ours.title).to_dict(),
                "milliseconds": round(timings.milliseconds(title), 3),
            }
            print(record, flush=True)
            records.append(record)
    return records


def operations_on_host(contender: TensorFlowContender) -> list[str]:
    """Types of a step's operations that were placed on the CPU."""
    inputs = contender.inputs_of(contender.workload.batches[0])
    contender.train(inputs)
    found = set()
    with tempfile.TemporaryDirectory() as directory:
        writer = tf.summary.create_file_writer(directory)
        tf.summary.trace_on(graph=True)
        contender.train(inputs)
        with writer.as_default():
            tf.summary.trace_export("step", step=0)
        writer.close()
        for path in pathlib.Path(directory).iterdir():
            for record in tf.data.TFRecordDataset(str(path)):
                event = tf.compat.v1.Event.FromString(record.numpy())
                for value in event.summary.value:
                    data = tf.compat.v1.RunMetadata.FromString(
                        value.tensor.string_val[0]
                    )
                    for graphs in data.function_graphs:
                        for graph in graphs.partition_graphs:
                            found |= {
                                node.op
                                for node in graph.node
                                if "CPU" in node.device
                            }
    return sorted(found - HOST_OPERATIONS)


def main() -> None:
    if not tf.config.list_physical_devices("GPU"):
        raise SystemExit("TensorFlow sees no GPU here.")
    registry = {
        "gpu": run_registry(on_gpu=True),
        "cpu": run_registry(on_gpu=False),
    }
    print(registry, flush=True)
    records, host = [], {}
    for workload in (workloads.single_table(10**6), workloads.many_tables()):
        host[workload.name] = operations_on_host(Ours(workload, "adagrad"))
        print("on the CPU:", host[workload.name], flush=True)
        records += compare(workload)
    print(
        json.dumps(
            {
                "registry": registry,
                "operations_on_cpu": host,
                "records": records,
            }
        )
    )


if __name__ == "__main__":
    main()
