"""Which device holds a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from tf_distembed.config import TableConfig

if TYPE_CHECKING:
    from tf_distembed.layer_config import Settings

DEFAULT_DEVICE, SPARSECORE = "default_device", "sparsecore"


def has_sparsecores() -> bool:
    """Whether the strategy in scope is that of a TPU with SparseCores."""
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.TPUStrategy):
        return False
    feature = strategy.extended.tpu_hardware_feature.embedding_feature
    kinds = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
    return feature == kinds.V2


def place(
    tables: Sequence[TableConfig], settings: Settings
) -> dict[str, list[TableConfig]]:
    """Placement -> its tables, both in order of configuration.

    Raises:
        ValueError: a placement that the strategy in scope does not offer, or
            a SparseCore setting without a table there.
    """
    placed: dict[str, list[TableConfig]] = {}
    for table in tables:
        placed.setdefault(_placement(table), []).append(table)
    if SPARSECORE not in placed:
        settings.check_without_sparsecore()
    return placed


def _placement(table: TableConfig) -> str:
    available = has_sparsecores()
    if table.placement == DEFAULT_DEVICE:
        return DEFAULT_DEVICE
    if available:
        return SPARSECORE
    if table.placement == SPARSECORE:
        strategy = tf.distribute.get_strategy()
        raise ValueError(
            f"Table '{table.name}' has placement '{SPARSECORE}', which needs a "
            "TPU with SparseCores and its TPUStrategy. Received: "
            f"{type(strategy).__name__}. Make the layer inside the scope of "
            "such a strategy, or use placement='default_device'."
        )
    return DEFAULT_DEVICE
