"""Which device holds a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from tf_distembed.config import TableConfig
from tf_distembed.strategy import REFUSED_PARAMETER_SERVER

if TYPE_CHECKING:
    from tf_distembed.layer_config import Settings

DEFAULT_DEVICE, SPARSECORE = "default_device", "sparsecore"


_Hardware = tf.tpu.experimental.HardwareFeature.EmbeddingFeature


def has_sparsecores() -> bool:
    """Whether the strategy in scope is that of a TPU with SparseCores."""
    return _embedding_hardware() == _Hardware.V2


def has_older_hardware() -> bool:
    """Whether it is that of a TPU before SparseCores, with their forerunner."""
    return _embedding_hardware() == _Hardware.V1


def _embedding_hardware() -> Any:
    strategy = tf.distribute.get_strategy()
    if not isinstance(strategy, tf.distribute.TPUStrategy):
        return _Hardware.UNSUPPORTED
    return strategy.extended.tpu_hardware_feature.embedding_feature


def place(
    tables: Sequence[TableConfig], settings: Settings
) -> dict[str, list[TableConfig]]:
    """Placement -> its tables, both in order of configuration.

    Raises:
        ValueError: a placement that the strategy in scope does not offer, or
            a SparseCore setting without a table there.
    """
    _check_scope()
    placed: dict[str, list[TableConfig]] = {}
    for table in tables:
        placed.setdefault(_placement(table), []).append(table)
    if SPARSECORE not in placed:
        settings.check_without_sparsecore()
    return placed


def _check_scope() -> None:
    """Raises for ways to distribute in which tables would train wrongly."""
    strategy = tf.distribute.get_strategy()
    if isinstance(
        strategy,
        (
            tf.distribute.ParameterServerStrategy,
            tf.compat.v1.distribute.experimental.ParameterServerStrategy,
        ),
    ):
        raise ValueError(REFUSED_PARAMETER_SERVER)
    distribution = keras.distribution.distribution()
    if distribution is None:
        return
    devices = int(np.prod(distribution.device_mesh.shape))
    if devices > 1:
        raise ValueError(
            f"keras.distribution is set to a {type(distribution).__name__} "
            f"over {devices} devices, which Keras' TensorFlow backend ignores: "
            "it would train on one. Unset it "
            "(keras.distribution.set_distribution(None)) and make the layer "
            "in the scope of a strategy from tde.make_strategy."
        )


def _placement(table: TableConfig) -> str:
    available = has_sparsecores() or has_older_hardware()
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
