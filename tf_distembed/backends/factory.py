"""Makes the backend of each placement that a layer's tables have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tf_distembed import placements
from tf_distembed.backends.base import Backend
from tf_distembed.backends.default_device import DefaultDeviceBackend
from tf_distembed.backends.sparsecore import SparseCoreBackend
from tf_distembed.backends.tpu_backend import TpuBackend
from tf_distembed.backends.tpu_embedding_v1 import TpuEmbeddingV1Backend
from tf_distembed.config import TableConfig
from tf_distembed.features import Feature
from tf_distembed.id_statistics import DroppedIds


def make_backends(
    placed: Mapping[str, Sequence[TableConfig]],
    features: Sequence[Feature],
    optimizers: dict[str, Any],
    settings: Any,
    dtype: str,
    layer_name: str,
) -> dict[str, Backend]:
    """Placement -> its backend.

    Args:
        placed: placement -> its tables.
        features: All features of the layer, in flat order.
        optimizers: table name -> optimizer object in use, or None.
        settings: The layer's arguments.
        dtype: Name of the tables' dtype.
        layer_name: What errors call the layer.
    """
    backends: dict[str, Backend] = {}
    for placement, tables in placed.items():
        own = [feature for feature in features if feature.table in tables]
        names = [feature.name for feature in own]
        if placement == placements.SPARSECORE:
            kind: type[TpuBackend] = SparseCoreBackend
            if placements.has_older_hardware():
                kind = TpuEmbeddingV1Backend
            backends[placement] = kind(
                own,
                tables,
                optimizers,
                settings.table_stacking,
                settings,
                DroppedIds(names, on_host=True),
                layer_name,
                dtype,
            )
        else:
            backends[placement] = DefaultDeviceBackend(
                own,
                tables,
                optimizers,
                settings.table_stacking,
                dtype,
                DroppedIds(names),
            )
    return backends
