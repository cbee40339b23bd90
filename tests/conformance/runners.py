"""Runs a layer's cases in training steps and gives back what came out.

Only public names are used, as a user would: a tape, an optimizer's `apply`,
tables set and read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.conformance.batches import Batch, fed_shape, make_batch, signature_of
from tests.conformance.cases import Layer
from tests.conformance.layers import made, make_layer
from tests.conformance.reference import Result

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
    declared_batch: int | None = None,
) -> Result:
    """Three training steps of a layer.

    Args:
        layer: the merged cases.
        default_optimizer: key into OPTIMIZERS.
        compiled: (step, signature of a batch) -> what is called with batches.
        strategy: runs the step on its replicas; None runs it as it is.
        shares: number of rows -> the rows of each replica.
        sees_gradients: whether a table's gradient is given to the user.
        declared_batch: rows of a global batch that the features declare.
    """
    scope = (strategy or tf.distribute.get_strategy()).scope()
    with scope:
        embedding = make_layer(layer, default_optimizer, declared_batch)
        if layer.model_optimizer.maker == "model":
            optimizer = made(layer.model_optimizer, "keras")
        else:
            optimizer = keras.optimizers.SGD(1.0)
        if not embedding.built:
            embedding.build({f.name: fed_shape(f) for f in layer.features})
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
            if len(batches) == 1:
                # What the strategy would make of it has another type.
                replicas = _of_replicas(strategy, call(batches[0]))
                _collect(result, layer, number, parts, replicas)
                continue
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
