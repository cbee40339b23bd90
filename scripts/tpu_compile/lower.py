"""Lowers training steps of the layer to what a TPU's compiler takes.

    python lower.py FOLDER

Needs tensorflow-tpu 2.20.0, no TPU, and TPU_LOAD_LIBRARY=0. Writes programs
and optimizer computations into FOLDER, and `manifest.json`, which says what
is to become of each. Checks on the way what can be seen before compilation.
"""

from __future__ import annotations

import json
import pathlib
import sys
import time
from typing import Any

import hlo
import models
import ops_api
import optimizer_computations
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2
from traced_step import TracedStep, traced_step

import tf_distembed as tde
from tf_distembed.testing.optimizer_steps import STEPS

ROOT = pathlib.Path(__file__).resolve().parents[2]
VECTORS = ROOT / "tests/testing/data/sparsecore_optimizer_steps.json"

CHIPS = 4
#: Topology -> SparseCores of a chip. Each has 4 chips.
SPARSECORES = {"v5p:2x2x1": 4, "v6e:2x2": 2}
#: One whose chips have none.
WITHOUT_SPARSECORES = "v5e:2x2"
#: More than any SparseCore holds.
TOO_MANY_IDS = 4_000_000
# What the compiler says of it.
TOO_MANY_IDS_ERROR = "max_nz_per_row = 4000000"
# What TensorFlow says of an operation that no TPU has.
STRINGS_ERROR = "AsString"

# From the host come a stack's sorted ids and the number of minibatches.
_FROM_HOST = frozenset(
    {
        "TPUAnnotateTensorsWithDynamicShape",
        "ConvertToSparseCoreCsrWrappedCooTensor",
    }
)


class Writer:
    """Writes files, and their list."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self.manifest: dict[str, list[Any]] = {
            "programs": [],
            "computations": [],
        }

    def add(self, kind: str, name: str, content: bytes, **facts: Any) -> None:
        """Writes one file and what is to be known of it."""
        file = f"{kind}{len(self.manifest[kind])}.hlo"
        (self.folder / file).write_bytes(content)
        self.manifest[kind].append({"name": name, "file": file, **facts})

    def finish(self) -> None:
        """Writes the list."""
        text = json.dumps(self.manifest, indent=1)
        (self.folder / "manifest.json").write_text(text)


def check(condition: bool, message: str) -> None:
    """Ends the process if a condition does not hold."""
    if not condition:
        sys.exit(f"scripts/tpu_compile: {message}")


def sparsecore_step(sparsecores: int, **settings: Any) -> Any:
    """The traced step of the model with tables on SparseCores."""
    max_ids = settings.pop("max_ids", 256)
    ops_api.answer_sparsecores(sparsecores)
    return traced_step(
        CHIPS,
        sparsecores,
        lambda: models.compiled_model(
            models.sparsecore_layer(max_ids), **settings
        ),
        models.batches(models.SPARSECORE_INPUTS),
    )


def check_trace(step: TracedStep, where: str, *, uses_host: bool) -> None:
    """Checks where a traced step is cut, and what it changes."""
    replica = step.replica
    check(replica.loops == 1, f"{where}: the step is not in a loop.")
    wrong = {t.op.type for t in replica.from_host()} - _FROM_HOST
    check(not wrong, f"{where}: the host sends what is no sorted id: {wrong}")
    check(
        bool(replica.from_host()) == uses_host,
        f"{where}: the host sends {replica.from_host()}.",
    )
    changed = replica.changed_variables()
    unchanged = {
        variable.name
        for name, variable in replica.variables.items()
        if name not in changed
    }
    wrong = {
        name
        for name in unchanged
        if not any(part in name for part in ("learning_rate", "gradient_trap"))
    }
    check(not wrong, f"{where}: a training step leaves {wrong} as they were.")


def chip_rows(vocabulary_sizes: list[int], sparsecores: int) -> int:
    """Rows of a stack on one chip, each table padded for all SparseCores."""
    unit = 8 * CHIPS * sparsecores
    padded = [-(-size // unit) * unit for size in vocabulary_sizes]
    return sum(padded) // CHIPS


def check_program(
    content: bytes, sparsecores: int, where: str
) -> tuple[Any, list[hlo.Update]]:
    """Checks a lowered program; what it updates, by name of the optimizer."""
    module = hlo_pb2.HloModuleProto.FromString(content)
    exchanges = hlo.host_exchanges(module)
    check(not exchanges, f"{where}: it exchanges {exchanges} with its host.")
    found = sorted(hlo.updates(module), key=lambda one: one.optimizer)
    users = chip_rows([models.USERS], sparsecores)
    items = chip_rows([models.ITEMS, models.BRANDS], sparsecores)
    # The rows, and each slot.
    expected = [
        ("adagrad", ((users, 8),) * 2),
        ("adam", ((items, 16),) * 3),
    ]
    got = [(one.optimizer, one.shapes) for one in found]
    check(got == expected, f"{where}: it updates {got}, not {expected}.")
    calls = hlo.custom_calls(module)
    check(
        calls.count(hlo.LOOKUP) == len(expected),
        f"{where}: it calls {calls}, not one lookup a stack.",
    )
    check(
        all(one.computes_rate for one in found),
        f"{where}: a learning rate is a constant: {found}.",
    )
    return module, found


def lower_sparsecore(writer: Writer, topology: str) -> None:
    """The program for a topology, and its optimizers' computations."""
    where = f"{topology}, tables on SparseCores"
    with sparsecore_step(SPARSECORES[topology]) as step:
        check_trace(step, where, uses_host=True)
        content = step.lower()
        module, found = check_program(content, SPARSECORES[topology], where)
        optimizers = step.model.embedding.table_optimizers
        for table, update in zip(("user", "item"), found, strict=True):
            computation = hlo.standalone(module, update.computation_id)
            writer.add(
                "computations",
                f"{where}: {update.optimizer}",
                computation.SerializeToString(),
                **optimizer_computations.expected_of_layer(
                    optimizers[table], update.shapes[0][1]
                ),
            )
    writer.add(
        "programs", where, content, topology=topology, chips=CHIPS, refused=None
    )


def lower_default_device(writer: Writer) -> None:
    """The program of a TPU that has no SparseCores."""
    where = f"{WITHOUT_SPARSECORES}, tables on the TensorCore"
    with traced_step(
        CHIPS,
        0,
        lambda: models.compiled_model(models.default_device_layer()),
        models.batches(models.DEFAULT_DEVICE_INPUTS),
    ) as step:
        check_trace(step, where, uses_host=False)
        content = step.lower()
    module = hlo_pb2.HloModuleProto.FromString(content)
    exchanges = hlo.host_exchanges(module) + hlo.custom_calls(module)
    check(not exchanges, f"{where}: it calls {exchanges}.")
    writer.add(
        "programs",
        where,
        content,
        topology=WITHOUT_SPARSECORES,
        chips=CHIPS,
        refused=None,
    )


def lower_faults(writer: Writer) -> None:
    """Programs that must be refused, by TensorFlow or by the compiler."""
    topology = "v5p:2x2x1"
    where = f"{topology}, {TOO_MANY_IDS:,} ids"
    with sparsecore_step(SPARSECORES[topology], max_ids=TOO_MANY_IDS) as step:
        writer.add(
            "programs",
            where,
            step.lower(),
            topology=topology,
            chips=CHIPS,
            refused=TOO_MANY_IDS_ERROR,
        )
    where = f"{topology}, a string operation"
    with sparsecore_step(SPARSECORES[topology], uses_strings=True) as step:
        try:
            step.lower()
        except (ValueError, tf.errors.OpError) as error:
            check(STRINGS_ERROR in str(error), f"{where}: refused by {error}.")
        else:
            check(False, f"{where}: TensorFlow lowers it.")
    print(f"refused, as it should be: {where}")


def lower_vectors(writer: Writer) -> None:
    """The computations of which the repository keeps values."""
    ops_api.answer_sparsecores(4)
    cases = json.loads(VECTORS.read_text())["cases"]
    kept = {case["optimizer"] for case in cases}
    check(kept == set(STEPS), f"{VECTORS} has values of {kept} only.")
    for case in cases:
        args = [[row] for row in case["args"]]
        writer.add(
            "computations",
            f"kept values of {case['optimizer']} {case['settings']}",
            optimizer_computations.of_operation(
                case["optimizer"], case["settings"], len(case["args"][0])
            ),
            args=args,
            out=[[row] for row in case["out"]],
        )


def main(folder: pathlib.Path) -> None:
    """Lowers everything."""
    tde.testing.prepare(CHIPS)
    writer = Writer(folder)
    for what, lower in (
        *(
            (topology, lambda t=topology: lower_sparsecore(writer, t))
            for topology in SPARSECORES
        ),
        (WITHOUT_SPARSECORES, lambda: lower_default_device(writer)),
        ("faults", lambda: lower_faults(writer)),
        ("kept values", lambda: lower_vectors(writer)),
    ):
        began = time.monotonic()
        lower()
        print(f"lowered: {what}, {time.monotonic() - began:.0f} s", flush=True)
    writer.finish()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
