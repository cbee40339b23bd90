"""What the layer keeps of a feature after reading the configuration once."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from tf_distembed.config import FeatureConfig, TableConfig

Path = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Feature:
    """One feature of a layer.

    Attributes:
        name: As in its `FeatureConfig`.
        path: Keys and indices that lead to it in the nested structure.
        table: The layer's own copy of the table's configuration; features of
            one table hold the same object.
        input_shape: As in its `FeatureConfig`.
        output_shape: As in its `FeatureConfig`.
        drops_invalid_ids: Whether ids outside the table are dropped instead
            of reported.
        padding_id: An id that stands for no id, or None.
    """

    name: str
    path: Path
    table: TableConfig
    input_shape: tuple[int | None, ...] | None
    output_shape: tuple[int | None, ...] | None
    drops_invalid_ids: bool
    padding_id: int | None = None

    @property
    def where(self) -> str:
        """What an error calls this feature."""
        return f"Feature '{self.name}'"

    @property
    def expected_ids(self) -> str:
        """What an error says about which ids there are."""
        size = self.table.vocabulary_size
        return (
            f"table '{self.table.name}' has vocabulary_size={size}, so ids "
            f"run from 0 to {size - 1}"
        )

    @property
    def cure_of_ids(self) -> str:
        """What an error says about ids outside the table."""
        return "Fix the ids, or use invalid_ids='drop'."

    @property
    def is_combined(self) -> bool:
        """Whether an example's ids are combined into one vector."""
        return self.output_shape is None or len(self.output_shape) == 2

    def output_shape_for(
        self, input_shape: Sequence[int | None]
    ) -> tuple[int | None, ...]:
        """Shape of the output for ids of `input_shape`, whose batch it has."""
        dim = self.table.embedding_dim
        if self.is_combined:
            return (input_shape[0], dim)
        assert self.output_shape is not None
        positions = self.output_shape[1]
        if positions is None:
            declared = self.input_shape
            if declared is not None and len(declared) == 2:
                positions = declared[1]
            if positions is None:
                positions = input_shape[1] if len(input_shape) == 2 else 1
        return (input_shape[0], positions, dim)


def read_features(
    configs: Sequence[tuple[Path, FeatureConfig]], invalid_ids: Any
) -> tuple[list[Feature], list[TableConfig]]:
    """Reads the configuration: the features, and their tables in order.

    Args:
        configs: Path and configuration of each feature, in flat order.
        invalid_ids: The layer's argument: `"error"`, `"drop"`, or a dict
            {feature name: one of them}, with `"error"` for those left out.

    Raises:
        ValueError: two features or two tables of one name; a policy that does
            not exist, or for a feature that does not.
    """
    policies = _policies([config.name for _, config in configs], invalid_ids)
    tables: dict[int, TableConfig] = {}
    features: list[Feature] = []
    for path, config in configs:
        config.table.validate()
        config.validate()
        if any(config.name == feature.name for feature in features):
            raise ValueError(
                f"Two features are named '{config.name}'. Give each "
                f"FeatureConfig a name of its own (the second is at {path})."
            )
        table = tables.get(id(config.table))
        if table is None:
            if any(config.table.name == t.name for t in tables.values()):
                raise ValueError(
                    f"Two tables are named '{config.table.name}' (the second "
                    f"is that of feature '{config.name}'). Give each "
                    "TableConfig a name of its own; to share a table, use the "
                    "same TableConfig object."
                )
            table = tables[id(config.table)] = copy.copy(config.table)
        features.append(
            Feature(
                name=config.name,
                path=path,
                table=table,
                input_shape=_as_tuple(config.input_shape),
                output_shape=_as_tuple(config.output_shape),
                drops_invalid_ids=policies[config.name] == "drop",
            )
        )
    return features, list(tables.values())


def _as_tuple(shape: Any) -> tuple[int | None, ...] | None:
    return None if shape is None else tuple(shape)


def _policies(names: list[str], invalid_ids: Any) -> dict[str, str]:
    if isinstance(invalid_ids, str):
        policies = dict.fromkeys(names, invalid_ids)
    elif isinstance(invalid_ids, dict):
        unknown = sorted(set(invalid_ids) - set(names), key=str)
        if unknown:
            raise ValueError(
                f"invalid_ids names features that do not exist: {unknown}. "
                f"The features are {sorted(names)}."
            )
        policies = {name: invalid_ids.get(name, "error") for name in names}
    else:
        raise TypeError(
            "invalid_ids must be 'error', 'drop' or a dict {feature name: one "
            f"of them}}. Received: {invalid_ids!r} (of type "
            f"{type(invalid_ids).__name__})"
        )
    for name, policy in policies.items():
        if policy not in ("error", "drop"):
            raise ValueError(
                f"Feature '{name}': invalid_ids must be 'error' or 'drop'. "
                f"Received: {policy!r}"
            )
    return policies
