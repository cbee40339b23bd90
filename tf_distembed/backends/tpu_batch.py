"""The static batch of a layer on a TPU.

What is sent to the embedding hardware has one size, which is fixed when the
variables are made: a replica's rows, and for each row one sample a feature,
or one a position where ids are not combined. Fewer rows are filled up on the
host and cut back from the outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tf_distembed.features import Feature


def declared_batch(features: Sequence[Feature]) -> int | None:
    """The global batch size, if the features declare it.

    Raises:
        ValueError: features declare different ones.
    """
    declared = {}
    for feature in features:
        for shape in (feature.output_shape, feature.input_shape):
            if shape is not None and shape[0] is not None:
                declared[feature.name] = shape[0]
    if len(set(declared.values())) > 1:
        raise ValueError(
            "Features with placement 'sparsecore' must declare one global "
            f"batch size. Received: {declared}"
        )
    return next(iter(declared.values()), None)


def batch_of(
    features: Sequence[Feature],
    ids: Sequence[Any],
    chips: int,
    layer_name: str,
) -> int:
    """The global batch size, declared or that of a replica's first inputs.

    Raises:
        ValueError: neither is known.
    """
    batch = declared_batch(features)
    if batch is not None:
        return batch
    known = [one.shape[0] for one in ids if one.shape[0] is not None]
    if known:
        return max(known) * chips
    raise ValueError(
        f"Layer '{layer_name}': placement 'sparsecore' needs a static batch. "
        "Declare the global batch as the first entry of input_shape or "
        "output_shape, or feed batches of a known size (drop_remainder=True)."
    )


def rows_of_replica(
    global_batch: int, chips: int, cores: int, layer_name: str
) -> int:
    """A replica's rows.

    Raises:
        ValueError: the batch cannot be divided over the SparseCores.
    """
    if global_batch % (chips * cores):
        raise ValueError(
            f"Layer '{layer_name}': placement 'sparsecore' divides the global "
            f"batch over {chips} replicas and each replica's part over "
            f"{cores} SparseCores, so it must be a multiple of "
            f"{chips * cores}. Received: a global batch of {global_batch}."
        )
    return global_batch // chips


def check_rows(
    features: Sequence[Feature], ids: Sequence[Any], rows: int, chips: int
) -> None:
    """Raises for inputs that have more than a replica's rows."""
    for feature, one in zip(features, ids, strict=True):
        found = one.shape[0]
        if found is None or found <= rows:
            continue
        whole = rows * chips
        hint = (
            " That is the global batch; strategy.run takes a replica's part "
            "of it."
            if found == whole
            else ""
        )
        raise ValueError(
            f"{feature.where}: a replica's batch has at most {rows} examples "
            f"(a global batch of {whole} over {chips} replicas). Received: "
            f"{found} examples.{hint}"
        )


def cut_back(
    output: tf.Tensor, ids: Any, rows: int, counted: tf.Tensor
) -> tf.Tensor:
    """A feature's output without the rows that the host has filled up.

    Args:
        output: `[rows, ...]`, of a replica.
        ids: The feature's ids, of any kind.
        rows: A replica's rows.
        counted: How many rows the ids have, as the host has found. Where the
            trace knows it, or the TPU does, the host is not waited for.
    """
    found = ids.shape[0]
    if found == rows:
        return output
    if found is None:
        # XLA bounds the length of the slice by `rows`.
        found = tf.shape(ids)[0] if isinstance(ids, tf.Tensor) else counted
    return output[:found]


def declared_width(feature: Feature) -> int | None:
    """Ids of an example, if the feature declares it."""
    if feature.input_shape is None:
        return None
    return (*feature.input_shape, 1)[1]


def widths_of(
    features: Sequence[Feature], ids: Sequence[Any]
) -> dict[str, int | None]:
    """feature name -> ids of an example, of the features with dense ids."""
    return {
        feature.name: one.shape[1] if one.shape.rank == 2 else 1
        for feature, one in zip(features, ids, strict=True)
        if isinstance(one, tf.Tensor)
    }


def positions_of(feature: Feature, width: int | None) -> int:
    """Samples of one example: one, or where ids are not combined several.

    Raises:
        ValueError: the number of positions is not known.
    """
    if feature.is_combined:
        return 1
    assert feature.output_shape is not None
    positions = feature.output_shape[1] or declared_width(feature) or width
    if positions is None:
        raise ValueError(
            f"{feature.where}: placement 'sparsecore' needs a static number "
            "of positions. Give it as the second entry of output_shape. "
            f"Received: output_shape={feature.output_shape}"
        )
    return positions
