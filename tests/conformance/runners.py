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
    Use,
    output_gradient,
)
from tests.conformance.reference import Result
from tests.conformance.registry import LAYERS, NAMES, OPTIMIZERS, layer_of

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
        feature -> "ids", "weights" (only if it has some; flat values unless
        `weights_apart`) and "gradient", the coefficients of its output in
        the loss.
    """
    batch: Batch = {}
    dims = {table.name: table.dim for table in layer.tables}
    for feature in layer.features:
        uses = [use for use in feature.uses(step) if use.row in rows]
        ids = tf.constant([use.id for use in uses], feature.dtype)
        fed = {"ids": _of_kind(feature, step, rows, uses, ids)}
        if feature.weights is not None:
            weights = tf.constant(
                [use.weight for use in uses], feature.weights_dtype
            )
            if feature.kind == "dense" or feature.weights_apart:
                weights = _of_kind(feature, step, rows, uses, weights)
            fed["weights"] = weights
        gradient = output_gradient(
            feature, step, layer.batches[step], dims[feature.table]
        )
        fed["gradient"] = tf.constant(
            gradient[rows.start : rows.stop], tf.float32
        )
        batch[feature.name] = fed
    return batch


def _of_kind(
    feature: Feature, step: int, rows: range, uses: list[Use], flat: tf.Tensor
) -> Any:
    """One value a use, in the kind of tensor that the feature is fed."""
    if feature.kind == "sparse":
        cells = [(use.row - rows.start, use.column) for use in uses]
        return tf.SparseTensor(
            np.array(cells, np.int64).reshape(-1, 2),
            flat,
            [len(rows), feature.columns],
        )
    if feature.kind == "ragged":
        lengths = [
            len(row) for row in feature.ids[step][rows.start : rows.stop]
        ]
        splits = np.cumsum([0, *lengths]).astype(feature.row_splits_dtype)
        return tf.RaggedTensor.from_row_splits(flat, splits, validate=False)
    if feature.rank == 1:
        return flat
    return tf.reshape(flat, [len(rows), _dense_width(feature)])


def _dense_width(feature: Feature) -> int:
    """The number of ids of each row, also if there is none."""
    rows = [row for step in feature.ids for row in step]
    if rows:
        return len(rows[0])
    assert feature.input_shape is not None
    return feature.input_shape[1]


def signature_of(layer: Layer, rows: int | None) -> Any:
    """The type of all its batches: one trace serves all steps.

    Args:
        layer: whose batches.
        rows: their number of rows, None if it varies.
    """
    batch = make_batch(layer, 0, range(0))

    def with_rows(feature: Feature, name: str, tensor: Any) -> tf.TypeSpec:
        spec = tf.type_spec_from_value(tensor)
        shape = [rows, *spec.shape[1:]]
        if isinstance(spec, tf.RaggedTensorSpec):
            return tf.RaggedTensorSpec(
                shape, spec.dtype, 1, spec.row_splits_dtype
            )
        if isinstance(spec, tf.SparseTensorSpec):
            return tf.SparseTensorSpec([rows, None], spec.dtype)
        if name == "weights" and feature.kind != "dense":
            shape = [None]
        return tf.TensorSpec(shape, spec.dtype)

    return {
        feature.name: {
            name: with_rows(feature, name, tensor)
            for name, tensor in batch[feature.name].items()
        }
        for feature in layer.features
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
        watched = {
            feature.name: weights[feature.name]
            for feature in layer.features
            if feature.weights_gradient
        }
        with tf.GradientTape() as tape:
            tape.watch(watched)
            for feature in layer.features:
                if feature.weights is not None and not feature.weights_apart:
                    weights[feature.name] = _with_flat_values(
                        ids[feature.name], weights[feature.name]
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


def _with_flat_values(ids: Any, flat: tf.Tensor) -> Any:
    return flat if isinstance(ids, tf.Tensor) else ids.with_values(flat)


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
        if isinstance(gradient, tf.IndexedSlices):
            gradient = tf.math.unsorted_segment_sum(
                gradient.values, gradient.indices, table.vocabulary
            )
        result[table.name] = gradient
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
    sizes = {len(part) for rows in layer.batches for part in shares(rows)}
    signature = signature_of(layer, sizes.pop() if len(sizes) == 1 else None)
    if strategy is None:
        call = compiled(step, signature)
    else:
        call = tf.function(
            lambda batch: strategy.run(step, args=(batch,)),
            input_signature=[_of_each_replica(strategy, signature)],
            autograph=False,
        )

    result = Result()
    for number, rows in enumerate(layer.batches):
        parts = shares(rows)
        batches = [make_batch(layer, number, part) for part in parts]
        if strategy is None:
            (batch,) = batches
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


def _of_each_replica(
    strategy: tf.distribute.Strategy, signature: Any
) -> tf.TypeSpec:
    """The type of a value that has this type on each replica."""
    dataset = tf.data.Dataset.from_generator(
        lambda: iter(()), output_signature=signature
    )
    return strategy.distribute_datasets_from_function(
        lambda _: dataset,
        # TPUs refuse ragged and sparse elements otherwise.
        tf.distribute.InputOptions(experimental_fetch_to_device=False),
    ).element_spec


def _fed_shape(feature: Feature) -> tuple[int | None, ...]:
    if feature.rank == 1:
        return (None,)
    if feature.kind == "dense":
        return (None, _dense_width(feature))
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
    #: The layers it runs, where the others would show nothing new.
    layers: tuple[str, ...] = tuple(LAYERS)

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
            step, input_signature=[signature], autograph=False
        ),
    )


def _eagerly(layer: Layer, optimizer: str, fixture: Callable) -> Result:
    return run_layer(layer, optimizer)


def _by_xla(layer: Layer, optimizer: str, fixture: Callable) -> Result:
    return run_layer(
        layer,
        optimizer,
        compiled=lambda step, signature: tf.function(
            step,
            input_signature=[signature],
            autograph=False,
            jit_compile=True,
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
    # Each replica looks up as a single device does; updates are what differs.
    "mirrored": Backend(
        _mirrored,
        layers=("adam", "batches", "momentum", "ftrl", "native", "model"),
    ),
}
