"""Runs a layer's cases on a backend and gives back what came out.

Only public names are used, as a user would: a tape, an optimizer's `apply`,
tables set and read. A backend is a `Backend` in BACKENDS; one more is one
more entry, whose `run` ends in `run_layer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import tf_distembed as tde
from tests.conformance.cases import (
    DEFAULT_DEVICE,
    Feature,
    Layer,
    Optimizer,
    output_gradient,
)
from tests.conformance.reference import Result
from tests.conformance.registry import NAMES, OPTIMIZERS, layer_of

_NATIVE = tf.tpu.experimental.embedding

_MAKERS: dict[tuple[str, str], Callable[..., Any]] = {
    ("keras", "sgd"): keras.optimizers.SGD,
    ("keras", "momentum"): keras.optimizers.SGD,
    ("keras", "adagrad"): keras.optimizers.Adagrad,
    ("keras", "adam"): keras.optimizers.Adam,
    ("keras", "ftrl"): keras.optimizers.Ftrl,
    ("native", "sgd"): _NATIVE.SGD,
    ("native", "native_adagrad"): _NATIVE.Adagrad,
    ("native", "native_adagrad_momentum"): _NATIVE.AdagradMomentum,
    ("native", "native_adam"): _NATIVE.Adam,
    ("native", "native_ftrl"): _NATIVE.FTRL,
}


# -- The layer ----------------------------------


def make_optimizer(name: str) -> Any:
    """The real optimizer of a key of OPTIMIZERS; None if a table has none."""
    optimizer = OPTIMIZERS[name]
    if optimizer.maker == "name":
        return NAMES[name]
    if optimizer.maker == "model":
        return None
    return _made(optimizer, optimizer.maker)


def _made(optimizer: Optimizer, maker: str) -> Any:
    settings = dict(optimizer.settings)
    if isinstance(settings["learning_rate"], dict):
        settings["learning_rate"] = keras.optimizers.schedules.ExponentialDecay(
            **settings["learning_rate"]
        )
    if optimizer.slots.get("accumulator"):
        settings["initial_accumulator_value"] = optimizer.slots["accumulator"]
    return _MAKERS[maker, optimizer.rule](**settings)


def make_layer(layer: Layer, default_optimizer: str) -> Any:
    """One DistributedEmbedding with all features of all the layer's cases."""
    # One object an optimizer, as users write it: tables of one width that
    # share the object are stacked.
    optimizers: dict[str, Any] = {}

    def optimizer_of(name: str) -> Any:
        if name not in optimizers:
            optimizers[name] = make_optimizer(name)
        return optimizers[name]

    tables = {
        table.name: tde.TableConfig(
            name=table.name,
            vocabulary_size=table.vocabulary,
            embedding_dim=table.dim,
            optimizer=optimizer_of(table.optimizer or default_optimizer),
            combiner=table.combiner,
            trainable=table.trainable,
        )
        for table in layer.tables
    }
    features = {
        feature.name: tde.FeatureConfig(
            name=feature.name,
            table=tables[feature.table],
            input_shape=feature.input_shape,
            output_shape=feature.output_shape,
        )
        for feature in layer.features
    }
    return tde.DistributedEmbedding(
        features,
        invalid_ids={f.name: f.invalid_ids for f in layer.features},
        **layer.settings,
    )


# -- The inputs ----------------------------------

Batch = dict[str, dict[str, Any]]


def make_batch(layer: Layer, step: int, rows: range) -> Batch:
    """What a replica is fed in a step: the features' rows `rows`.

    Returns:
        feature -> "ids", "weights" (only if it has some) and "gradient", the
        coefficients of its output in the loss.
    """
    batch: Batch = {}
    dims = {table.name: table.dim for table in layer.tables}
    for feature in layer.features:
        fed = {"ids": _tensor(feature, step, rows, feature.ids, feature.dtype)}
        if feature.weights is not None:
            fed["weights"] = _tensor(
                feature, step, rows, feature.weights, feature.weights_dtype
            )
        gradient = output_gradient(
            feature, step, layer.batches[step], dims[feature.table]
        )
        fed["gradient"] = tf.constant(
            gradient[rows.start : rows.stop], tf.float32
        )
        batch[feature.name] = fed
    return batch


def _tensor(
    feature: Feature, step: int, rows: range, steps: Sequence, dtype: str
) -> Any:
    """The rows of one step's ids, or of its weights, as the feature's kind."""
    values = steps[step]
    if feature.kind == "sparse":
        cells = feature.ids[step]
        if steps is feature.ids:
            values = [value for _, _, value in cells]
        here = [i for i, (row, _, _) in enumerate(cells) if row in rows]
        indices = [(cells[i][0] - rows.start, cells[i][1]) for i in here]
        return tf.SparseTensor(
            np.array(indices, np.int64).reshape(-1, 2),
            tf.constant([values[i] for i in here], dtype),
            [len(rows), feature.columns],
        )
    values = values[rows.start : rows.stop]
    flat = tf.constant([value for row in values for value in row], dtype)
    if feature.kind == "ragged":
        return tf.RaggedTensor.from_row_lengths(
            flat,
            tf.constant([len(row) for row in values], feature.row_splits_dtype),
        )
    if feature.rank == 1:
        return flat
    return tf.reshape(flat, [len(values), len(feature.ids[0][0])])


def signature_of(batch: Batch) -> Any:
    """The batch's type with any number of rows: one trace for all steps."""

    def open_rows(tensor: Any) -> tf.TypeSpec:
        spec = tf.type_spec_from_value(tensor)
        shape = [None, *spec.shape[1:]]
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(
                shape, spec.dtype, 1, spec.row_splits_dtype
            )
        if isinstance(spec, tf.SparseTensorSpec):
            return tf.SparseTensorSpec([None, None], spec.dtype)
        return tf.TensorSpec(shape, spec.dtype)

    return {
        feature: {name: open_rows(tensor) for name, tensor in fed.items()}
        for feature, fed in batch.items()
    }


# -- The training step ----------------------------------


def training_step(
    layer: Layer, embedding: Any, optimizer: Any, *, sees_gradients: bool
) -> Callable[[Batch], dict[str, dict[str, tf.Tensor]]]:
    """A step that looks up, takes the gradient once and applies it once.

    Returns:
        A function of a `make_batch`, whose result is
        "outputs": feature -> output, "weights": feature -> gradient to each
        weight, and if `sees_gradients` "tables": table -> summed gradient.
    """

    def step(batch: Batch) -> dict[str, dict[str, tf.Tensor]]:
        ids = {name: fed["ids"] for name, fed in batch.items()}
        weights = {name: fed.get("weights") for name, fed in batch.items()}
        watched = {}
        with tf.GradientTape() as tape:
            for feature in layer.features:
                if feature.weights_gradient:
                    flat = _flat_values(weights[feature.name])
                    tape.watch(flat)
                    watched[feature.name] = flat
                    weights[feature.name] = _with_flat_values(
                        weights[feature.name], flat
                    )
            outputs = embedding(ids, weights, training=True)
            loss = tf.add_n(
                [
                    tf.reduce_sum(
                        outputs[feature.name] * batch[feature.name]["gradient"]
                    )
                    for feature in layer.features
                    if feature.in_loss
                ]
            )
        variables = embedding.trainable_variables
        gradients, weights_gradients = tape.gradient(loss, (variables, watched))
        optimizer.apply(gradients, variables)
        result = {
            "outputs": outputs,
            "weights": {
                name: tf.reshape(gradient, [-1])
                for name, gradient in weights_gradients.items()
            },
        }
        if sees_gradients:
            result["tables"] = _by_table(layer, variables, gradients)
        return result

    return step


def _flat_values(weights: Any) -> tf.Tensor:
    return weights if isinstance(weights, tf.Tensor) else weights.values


def _with_flat_values(weights: Any, flat: tf.Tensor) -> Any:
    return flat if isinstance(weights, tf.Tensor) else weights.with_values(flat)


def _by_table(
    layer: Layer, variables: Sequence, gradients: Sequence
) -> dict[str, tf.Tensor]:
    """Table -> the gradient to it, with all uses of a row summed."""
    result = {}
    for table in layer.tables:
        found = [
            gradient
            for variable, gradient in zip(variables, gradients, strict=True)
            if table.name in variable.path.split("/")
        ]
        if not table.trainable:
            assert not found, f"frozen table {table.name} has a gradient"
            continue
        (gradient,) = found
        result[table.name] = tf.math.unsorted_segment_sum(
            gradient.values, gradient.indices, table.vocabulary
        )
    return result


# -- A run ----------------------------------


def run_layer(
    layer: Layer,
    default_optimizer: str,
    *,
    compiled: Callable[[Callable, Any], Callable] = lambda step, signature: (
        step
    ),
    strategy: tf.distribute.Strategy | None = None,
    shares: Callable[[int], Sequence[range]] = lambda rows: [range(rows)],
    sees_gradients: bool = True,
) -> Result:
    """Three training steps of a layer.

    Args:
        layer: the merged cases.
        default_optimizer: key into OPTIMIZERS.
        compiled: (step, signature of a batch) -> what is called with batches.
        strategy: runs the step on its replicas; None runs it as it is.
        shares: number of rows -> the rows of each replica.
        sees_gradients: whether a table's gradient is given to the user.
    """
    scope = (strategy or tf.distribute.get_strategy()).scope()
    with scope:
        embedding = make_layer(layer, default_optimizer)
        if layer.model_optimizer.maker == "model":
            optimizer = _made(layer.model_optimizer, "keras")
        else:
            optimizer = keras.optimizers.SGD(1.0)
        if not embedding.built:
            embedding.build({f.name: _fed_shape(f) for f in layer.features})
        optimizer.build(embedding.trainable_variables)
    embedding.set_embedding_tables(
        {t.name: t.initial_values().astype("float32") for t in layer.tables}
    )
    step = training_step(
        layer, embedding, optimizer, sees_gradients=sees_gradients
    )
    if strategy is None:
        call = compiled(step, None)
    else:
        call = tf.function(
            lambda batch: strategy.run(step, args=(batch,)),
            reduce_retracing=True,
        )

    result = Result()
    for number, rows in enumerate(layer.batches):
        parts = shares(rows)
        batches = [make_batch(layer, number, part) for part in parts]
        if strategy is None:
            (batch,) = batches
            if number == 0:
                call = compiled(step, signature_of(batch))
            replicas = [tf.nest.map_structure(np.asarray, call(batch))]
        else:
            distributed = strategy.experimental_distribute_values_from_function(
                lambda context, batches=batches: batches[
                    context.replica_id_in_sync_group
                ]
            )
            replicas = _of_replicas(strategy, call(distributed))
        _collect(result, layer, number, parts, replicas)

    result.tables = {
        name: np.asarray(value)
        for name, value in embedding.get_embedding_tables().items()
    }
    for name, state in embedding.get_optimizer_state().items():
        result.slots[name] = {
            slot: np.asarray(value)
            for slot, value in state.items()
            if slot != "step"
        }
        result.steps[name] = int(state["step"])
    return result


def _fed_shape(feature: Feature) -> tuple[int | None, ...]:
    if feature.rank == 1:
        return (None,)
    if feature.kind == "dense":
        return (None, len(feature.ids[0][0]))
    return (None, None)


def _of_replicas(
    strategy: tf.distribute.Strategy, results: Mapping[str, Mapping]
) -> list[dict[str, dict[str, np.ndarray]]]:
    """{..: per-replica value} -> one such dictionary of arrays a replica."""
    local = {
        what: {
            name: [
                np.asarray(v) for v in strategy.experimental_local_results(x)
            ]
            for name, x in values.items()
        }
        for what, values in results.items()
    }
    return [
        {
            what: {name: parts[replica] for name, parts in values.items()}
            for what, values in local.items()
        }
        for replica in range(strategy.num_replicas_in_sync)
    ]


def _collect(
    result: Result,
    layer: Layer,
    step: int,
    parts: Sequence[range],
    replicas: Sequence[dict[str, dict[str, np.ndarray]]],
) -> None:
    """Adds a step's results, put together from those of its replicas."""
    result.outputs.append(
        {
            feature.name: np.concatenate(
                [replica["outputs"][feature.name] for replica in replicas]
            )
            for feature in layer.features
        }
    )
    weights: dict[str, np.ndarray] = {}
    for feature in layer.features:
        if not feature.weights_gradient:
            continue
        uses = feature.uses(step)
        weights[feature.name] = np.full(len(uses), np.nan)
        for part, replica in zip(parts, replicas, strict=True):
            here = [use.index for use in uses if use.row in part]
            weights[feature.name][here] = replica["weights"][feature.name]
    result.weights_gradients.append(weights)
    if "tables" in replicas[0]:
        result.table_gradients.append(
            {
                name: np.sum([r["tables"][name] for r in replicas], axis=0)
                for name in replicas[0]["tables"]
            }
        )


# -- Backends ----------------------------------


@dataclasses.dataclass(frozen=True)
class Backend:
    """A way to run a layer.

    `run` receives the layer, the key of its usual optimizer and a function
    that gives a session fixture by its name.
    """

    run: Callable[[Layer, str, Callable[[str], Any]], Result]
    #: Family named by the cases' `backends`.
    family: str = DEFAULT_DEVICE
    #: Whether XLA compiles the step, which it does for dense inputs.
    xla: bool = False

    def layer(self, name: str) -> Layer:
        """The cases of the layer that hold on this backend."""
        return layer_of(
            name, family=self.family, dense_only=self.xla, compiled=self.xla
        )


def _in_function(layer: Layer, optimizer: str, fixture: Callable) -> Result:
    return run_layer(
        layer,
        optimizer,
        compiled=lambda step, signature: tf.function(
            step, input_signature=[signature]
        ),
    )


def _eagerly(layer: Layer, optimizer: str, fixture: Callable) -> Result:
    return run_layer(layer, optimizer)


def _by_xla(layer: Layer, optimizer: str, fixture: Callable) -> Result:
    return run_layer(
        layer,
        optimizer,
        compiled=lambda step, signature: tf.function(
            step, input_signature=[signature], jit_compile=True
        ),
    )


def _mirrored(layer: Layer, optimizer: str, fixture: Callable) -> Result:
    def uneven(rows: int) -> list[range]:
        first = min(rows, 5)
        return [range(first), range(first, rows)]

    return run_layer(
        layer, optimizer, strategy=fixture("mirrored"), shares=uneven
    )


BACKENDS = {
    "default_device": Backend(_in_function),
    "default_device_eager": Backend(_eagerly),
    "default_device_xla": Backend(_by_xla, xla=True),
    "mirrored": Backend(_mirrored),
}
