"""What is measured of the layer itself: its size, its calls, its memory."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks import workloads
from benchmarks.comparison import Effort
from benchmarks.timing import interleave
from benchmarks.workloads import Workload

Record = dict[str, Any]


def same_ids(sizes: tuple[int, ...], effort: Effort) -> Iterator[Record]:
    """Training on the same 5,000 ids in tables of growing size.

    Beside ours, keras-rs in tables of up to 10^6 rows.
    """
    from benchmarks.keras_contenders import KerasRs
    from benchmarks.tf_contenders import Ours

    calls: dict[str, Callable[[], None]] = {}
    for rows in sizes:
        workload = workloads.single_table(
            rows, batch_size=500, used_rows=min(sizes)
        )
        calls[f"{Ours.title} {rows}"] = Ours(workload, "adagrad").calls(
            training=True
        )
        if rows <= 10**6:
            calls[f"{KerasRs.title} {rows}"] = KerasRs(
                workload, "adagrad"
            ).calls(training=True)
    timings = interleave(
        calls, rounds=effort.rounds, warm_up=effort.warm_up, least_seconds=0.05
    )
    for name in calls:
        title, size = name.rsplit(" ", 1)
        base = f"{Ours.title} {min(sizes)}"
        yield {
            "workload": "same 5,000 ids",
            "rows": int(size),
            "mode": "train",
            "optimizer": "adagrad",
            "contender": title,
            **timings.figures(name, base),
        }


def _model(layer: Any, workload: Workload, optimizer: Any) -> Any:
    import keras
    import tensorflow as tf

    ids = keras.Input(
        (None,), workload.batch_size, dtype="int64", ragged=True, name="item"
    )
    model = keras.Model(ids, layer({"item": ids})["item"])
    model.compile(
        optimizer,
        # Its gradient is the labels, but for a factor.
        lambda labels, outputs: tf.reduce_sum(labels * outputs, -1),
        jit_compile=False,
    )
    return model


def _dataset(workload: Workload) -> Any:
    import tensorflow as tf

    parts = [
        tf.data.Dataset.from_tensors(
            (
                tf.RaggedTensor.from_row_splits(
                    batch.ids[0].values, batch.ids[0].splits
                ),
                batch.gradients[0],
            )
        )
        for batch in workload.batches
    ]
    whole = parts[0]
    for part in parts[1:]:
        whole = whole.concatenate(part)
    return whole.cache().repeat()


def public_calls(rows: int, effort: Effort) -> Iterator[Record]:
    """A through `model.fit` and `make_train_step`, and keras-rs' `fit`.

    The base is a compiled step that is given the gradient. `fit` and the step
    helper compute a loss over the outputs too, and read a `tf.data` pipeline.
    """
    import keras
    import tensorflow as tf

    import tf_distembed as tde
    from benchmarks.keras_contenders import KerasRs
    from benchmarks.tf_contenders import Ours, keras_optimizer

    workload = workloads.single_table(rows)
    ours, peer = Ours(workload, "adagrad"), KerasRs(workload, "adagrad")
    data = _dataset(workload)
    steps = 10
    models = {
        "model.fit": _model(
            Ours(workload, "adagrad").layer, workload, keras.optimizers.SGD()
        ),
        "keras-rs model.fit": _model(
            peer.layer, workload, keras_optimizer("adagrad")
        ),
    }

    def fit(model: Any) -> Callable[[], None]:
        return lambda: model.fit(data, steps_per_epoch=steps, verbose=0)

    step = tde.make_train_step(
        _model(
            Ours(workload, "adagrad").layer, workload, keras.optimizers.SGD()
        )
    )
    iterator = iter(data)
    one, many = ours.calls(training=True), range(steps)
    calls: dict[str, Callable[[], None]] = {
        "compiled step": lambda: [one() for _ in many],  # type: ignore[dict-item,return-value]
        "make_train_step": lambda: [step(next(iterator)) for _ in many],  # type: ignore[dict-item,return-value]
        **{name: fit(model) for name, model in models.items()},
    }
    timings = interleave(
        calls, rounds=effort.rounds, warm_up=2, least_seconds=0
    )
    for name in calls:
        yield {
            "workload": "public calls",
            "rows": rows,
            "mode": "train",
            "optimizer": "adagrad",
            "contender": name,
            **timings.figures(name, "compiled step", steps),
        }
    yield {"workload": "traces", **_traces(tf, tde, workload)}


def _traces(tf: Any, tde: Any, workload: Workload) -> dict[str, Any]:
    """Graphs made for batches whose number of ids is never the same."""
    from benchmarks.tf_contenders import Ours

    ours = Ours(workload, "adagrad")
    call = ours.calls(training=True)
    for _ in workload.batches:
        call()
    sizes = {len(batch.ids[0].values) for batch in workload.batches}
    return {"batches": len(sizes), "traces": ours.traces}


def input_pipeline(rows: int, effort: Effort) -> Iterator[Record]:
    """Reading a batch, and `preprocess` in the pipeline, against a step."""
    from benchmarks.tf_contenders import Ours

    workload = workloads.single_table(rows)
    ours = Ours(workload, "adagrad")
    data = _dataset(workload)
    mapped = data.map(
        lambda ids, labels: (ours.layer.preprocess({"item": ids}), labels)
    )
    plain, prepared = iter(data), iter(mapped)
    calls: dict[str, Callable[[], Any]] = {
        "training step": ours.calls(training=True),
        "next batch": lambda: next(plain),
        "next batch, preprocess in map": lambda: next(prepared),
    }
    timings = interleave(
        calls, rounds=effort.rounds, warm_up=effort.warm_up, least_seconds=0.05
    )
    for name in calls:
        yield {
            "workload": "input pipeline",
            "rows": rows,
            "contender": name,
            **timings.figures(name, "training step"),
            "examples_per_second": round(
                1e3 * workload.batch_size / timings.milliseconds(name)
            ),
        }


def huge_pages(rows: int, effort: Effort) -> Iterator[Record]:
    """The same step with its tables on pages of 4 KiB and of 2 MiB."""
    from benchmarks.pages import use_huge_pages
    from benchmarks.tf_contenders import Ours

    for workload in (workloads.single_table(rows), workloads.many_tables()):
        calls = {}
        for pages in ("4 KiB pages", "2 MiB pages"):
            ours = Ours(workload, "adagrad")
            if pages == "2 MiB pages":
                # Before anything is looked up: TensorFlow would hand out a
                # copy of the values afterwards.
                table: Any
                for table in ours.layer.trainable_variables:
                    slots = table.row_optimizer.slots.values()
                    for variable in (table, *slots):
                        use_huge_pages(variable.value)
            calls[pages] = ours.calls(training=True)
        timings = interleave(
            calls, rounds=effort.rounds, warm_up=effort.warm_up
        )
        for name in calls:
            yield {
                "workload": f"pages, {workload.name}",
                "rows": sum(workload.tables),
                "mode": "train",
                "optimizer": "adagrad",
                "contender": name,
                **timings.figures(name, "2 MiB pages"),
            }


MEMORY_CONTENDERS = ("ours", "keras-rs")


def peak_memory(rows: int) -> Iterator[Record]:
    """The peak of a process that makes tables and trains; one process each."""
    for name in MEMORY_CONTENDERS:
        command = [sys.executable, "-m", "benchmarks.own_experiments"]
        done = subprocess.run(
            [*command, name, str(rows)],
            check=True,
            capture_output=True,
            text=True,
        )
        yield json.loads(done.stdout.splitlines()[-1])


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _train_and_report(name: str, rows: int) -> Record:
    from benchmarks import keras_contenders, tf_contenders

    make: Any = tf_contenders.Ours
    if name == "keras-rs":
        make = keras_contenders.KerasRs
    workload = workloads.single_table(rows)
    empty = _peak()
    call = make(workload, "adam").calls(training=True)
    start = time.perf_counter()
    for _ in range(12):
        call()
    seconds = time.perf_counter() - start
    state = 3 * rows * workload.dim * np.dtype(np.float32).itemsize
    return {
        "workload": "peak memory",
        "rows": rows,
        "optimizer": "adam",
        "contender": make.title,
        "table_and_slots_bytes": state,
        "peak_bytes": _peak() - empty,
        "peak_per_state": round((_peak() - empty) / state, 2),
        "seconds_of_12_steps": round(seconds, 2),
    }


if __name__ == "__main__":
    print(json.dumps(_train_and_report(sys.argv[1], int(sys.argv[2]))))
