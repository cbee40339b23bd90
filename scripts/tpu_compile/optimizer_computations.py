"""The optimizers' computations that TensorFlow lowers, to be run on a CPU.

Each is part of the program for a TPU: the step of one optimizer on one row.
"""

from __future__ import annotations

import re
from typing import Any

import hlo
import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.service import hlo_pb2

from tf_distembed import row_optimizers
from tf_distembed.backends.tpu_optimizers import added_to_slot
from tf_distembed.row_rules import Adam
from tf_distembed.testing import optimizer_steps
from tf_distembed.testing.private_tensorflow import gen_xla_ops

# Any multiple of 8.
_ROWS = 64
# Any step but the first, at which many mistakes do not show.
_STEP = 7


def of_operation(optimizer: str, settings: dict[str, Any], dim: int) -> bytes:
    """The computation of one SparseCore operation.

    Args:
        optimizer: As the operation's name has it, such as `"Adam"`.
        settings: The operation's own attributes.
        dim: Width of the row.

    Returns:
        A serialized HLO module of `(gradient, row, slots..., learning rate)`,
        each `[1, dim]`; it returns `(row, slots...)`.
    """
    slots = optimizer_steps.STEPS[optimizer].slots
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", optimizer).lower()
    operation = getattr(
        gen_xla_ops,
        f"xla_sparse_dense_matmul_grad_with_{name}_and_static_buffer_size",
    )
    table = tf.zeros([_ROWS, dim])

    @tf.function(jit_compile=True, autograph=False)
    def update(learning_rate: tf.Tensor) -> Any:
        return operation(
            row_pointers=tf.zeros([4096], tf.int32),
            sorted_sample_ids=tf.zeros([256], tf.int32),
            sorted_token_ids=tf.zeros([256], tf.int32),
            sorted_gains=tf.zeros([256]),
            activation_gradients=tf.zeros([16, dim]),
            learning_rate=learning_rate,
            embedding_table=table,
            num_minibatches_per_physical_sparse_core=tf.constant(1),
            max_ids_per_sparse_core=64,
            max_unique_ids_per_sparse_core=64,
            table_name="table",
            **dict.fromkeys(slots, table),
            **settings,
        )

    lower = update.experimental_get_compiler_ir(tf.constant(0.1))
    lowered = lower(stage="hlo_serialized", platform_name="TPU")
    module = hlo_pb2.HloModuleProto.FromString(lowered)
    (found,) = hlo.updates(module)
    return hlo.standalone(module, found.computation_id).SerializeToString()


def expected_of_layer(optimizer: Any, dim: int) -> dict[str, Any]:
    """What the default device makes of a row, for the same step.

    Args:
        optimizer: A table's optimizer in use.
        dim: Width of the row.

    Returns:
        `"args"` of the computation that the layer gives to the SparseCore,
        and `"out"`, the row and the slots that it should return: lists of
        `[1, dim]`.
    """
    rule = row_optimizers.rule_of(optimizer, "A stack")
    rng = np.random.default_rng(1)
    gradient, row = rng.normal(size=(2, 1, dim)).astype("float32")
    slots = {
        name: rng.uniform(0.1, 1.0, (1, dim)).astype("float32")
        for name in rule.slots
    }
    rate = 0.3
    new_row, new_slots = rule.update(
        tf.constant(row),
        tf.constant(gradient),
        {name: tf.constant(slot) for name, slot in slots.items()},
        tf.constant(_STEP),
        tf.constant(rate),
    )
    if isinstance(rule, Adam):
        rate = rate * rule.correction(tf.constant(_STEP), tf.float32).numpy()

    def shifted(slot: str, value: Any) -> np.ndarray:
        return np.asarray(value) + np.float32(added_to_slot(rule, slot))

    return {
        "args": [
            gradient.tolist(),
            row.tolist(),
            *(shifted(k, v).tolist() for k, v in slots.items()),
            np.full((1, dim), rate, "float32").tolist(),
        ],
        "out": [
            new_row.numpy().tolist(),
            *(shifted(k, new_slots[k]).tolist() for k in slots),
        ],
    }
