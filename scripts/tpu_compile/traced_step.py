"""`make_train_step`, traced for a TPU where there is none.

The emulator's strategy describes the hardware, and TensorFlow's own
TPUStrategy traces. What the emulator then does, building each traced replica
out of CPU operations, is left out: the trace stays as a TPU would get it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from replica_graph import Replica

import tf_distembed as tde
from tf_distembed.testing.private_tensorflow import (
    TPUExtended,
    TPUHardwareFeature,
    copy_on_each,
)

STEPS = 4


@dataclasses.dataclass
class TracedStep:
    """The loop of a training step, traced.

    Attributes:
        model: The model that it trains.
        replica: The step in the loop, of one replica.
        inputs: Values of `replica.inputs()` for one batch.
    """

    model: Any
    replica: Replica
    inputs: list[tf.Tensor]

    def lower(self) -> bytes:
        """The program of `STEPS` steps for a TPU, a serialized HLO module.

        Its inputs are the state, and for each step the batch: what was fed,
        and what the host's blocks made of it.

        Raises:
            ValueError: TensorFlow cannot lower it.
        """
        from_host = self.replica.run_host_blocks(self.inputs)
        state = {
            name: tf.zeros(variable.shape, variable.dtype)
            for name, variable in self.replica.variables.items()
        }

        @tf.function(jit_compile=True, autograph=False)
        def program(inputs: Any, from_host: Any, state: Any) -> Any:
            def step(i: tf.Tensor, state: Any) -> Any:
                after = self.replica.build_device_half(
                    [value[i] for value in inputs],
                    [value[i] for value in from_host],
                    state,
                )
                return i + 1, after

            _, state = tf.while_loop(
                lambda i, _: i < STEPS, step, [tf.constant(0), state]
            )
            return state

        of_all_steps = [
            [tf.stack([value] * STEPS) for value in values]
            for values in (self.inputs, from_host)
        ]
        lower = program.experimental_get_compiler_ir(*of_all_steps, state)
        return lower(stage="hlo_serialized", platform_name="TPU")


@contextlib.contextmanager
def traced_step(
    chips: int,
    sparsecores: int,
    make_model: Callable[[], Any],
    dataset: tf.data.Dataset,
) -> Iterator[TracedStep]:
    """Traces the training step of a model for several chips.

    Args:
        chips: Chips, and so replicas.
        sparsecores: SparseCores of a chip; 0: it has none.
        make_model: Makes a compiled model; called in the strategy's scope.
        dataset: Global batches.
    """
    with tde.testing.sparsecore_emulator(chips, sparsecores or 1) as strategy:
        inside: Any = strategy.extended
        if not sparsecores:
            inside._tpu_cluster_resolver._hardware = TPUHardwareFeature(
                embedding_feature=TPUHardwareFeature.UNSUPPORTED
            )
        with strategy.scope():
            model = make_model()
        batches = iter(tde.distribute_dataset(dataset, strategy))
        step: Any = tde.make_train_step(model, steps_per_call=STEPS)
        step.take_hint(batches)
        first, *_ = step.prepare(batches.get_next())
        variables: dict[str, tf.Variable] = {}

        def note_variable(handle: tf.Tensor, copies: Any) -> None:
            copy, *_ = copy_on_each(copies, inside.worker_devices)
            variables[handle.name] = copy

        inside.note_variable = note_variable
        # Past the emulator's.
        inside._tpu_function_creator = (
            TPUExtended._tpu_function_creator.__get__(inside)
        )
        loop = step._on_iterator.get_concrete_function(
            batches, tf.constant(STEPS)
        )
        replica = Replica.find(loop.graph, variables)
        # TensorFlow puts the replica's id first, and constants of its own
        # last.
        values = [tf.constant(0)]
        values += tf.nest.flatten(first, expand_composites=True)
        for tensor in replica.inputs()[len(values) :]:
            values.append(tf.constant(tf.get_static_value(tensor.op.inputs[0])))
        yield TracedStep(model, replica, values)
