"""What a user declares: tables, and the features that look up in them.

Both classes are plain dataclasses compared by identity: two features share a
table by naming the same `TableConfig` object. They are read once, when the
layer is made; changing one afterwards changes nothing.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tf_distembed import initial_values, row_optimizers

COMBINERS = ("sum", "mean", "sqrtn")
PLACEMENTS = ("auto", "default_device", "sparsecore")

# No machine that TensorFlow addresses holds one table beyond this; a larger
# product of two integers is a mistake (ids hashed to 64 bits, swapped fields).
MAX_TABLE_BYTES = 4 * 2**40

Shape = Sequence[int | None]


@dataclasses.dataclass(eq=False)
class TableConfig:
    """One embedding table: its rows, how they are combined and trained.

    Args:
        name: Unique within a layer; becomes the name of the table's sub-layer
            and its key in every file, so it may not contain `/`.
        vocabulary_size: Number of rows. Ids run from 0 to
            `vocabulary_size - 1`.
        embedding_dim: Width of a row.
        initializer: `None` (`VarianceScaling(mode="fan_out")`, a standard
            deviation of `1/sqrt(embedding_dim)`), a Keras initializer, its
            name or class, a callable `(shape, dtype) -> values`, or an array
            of shape `[vocabulary_size, embedding_dim]`.
        optimizer: The table's own optimizer, which takes one step on each row
            that a batch touches: `"sgd"`, `"adagrad"`, `"adam"` or `"ftrl"` in
            any case, a Keras optimizer or its config dict, or a
            `tf.tpu.experimental.embedding` optimizer. `None`: the layer's
            `optimizer=`; without that, the table is an ordinary weight.
        combiner: `"sum"`, `"mean"` or `"sqrtn"`, as in
            `tf.nn.embedding_lookup_sparse`.
        placement: `"auto"`, `"default_device"` or `"sparsecore"`.
        max_ids_per_partition: SparseCore only: the most ids that one
            partition of a batch may hold.
        max_unique_ids_per_partition: Likewise, for distinct ids.
        trainable: `False`: the table is looked up and never updated.

    Raises:
        TypeError: a field of a wrong Python type.
        ValueError: a field with a wrong value, an optimizer or optimizer
            setting that tables cannot have, or a table too large for any
            machine.

    Example:

    ```python
    import tf_distembed as tde

    movie = tde.TableConfig("movie", 1_682, 16, optimizer="adagrad")
    ```
    """

    name: str
    vocabulary_size: int
    embedding_dim: int
    initializer: Any = None
    optimizer: Any = "adam"
    combiner: str = "mean"
    placement: str = "auto"
    max_ids_per_partition: int = 256
    max_unique_ids_per_partition: int = 256
    trainable: bool = True

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Checks every field; the layer calls it again when it reads this."""
        _check_name(self.name, "TableConfig")
        where = f"Table '{self.name}'"
        for field in (
            "vocabulary_size",
            "embedding_dim",
            "max_ids_per_partition",
            "max_unique_ids_per_partition",
        ):
            value = getattr(self, field)
            setattr(self, field, _positive_int(value, field, where))
        if not isinstance(self.trainable, bool):
            raise TypeError(
                f"{where}: trainable must be True or False. "
                f"Received: {_shown(self.trainable)}"
            )
        _check_choice(self.combiner, COMBINERS, "combiner", where)
        _check_choice(self.placement, PLACEMENTS, "placement", where)
        size = self.vocabulary_size * self.embedding_dim * 4
        if size > MAX_TABLE_BYTES:
            raise ValueError(
                f"{where}: {self.vocabulary_size:,} rows of "
                f"{self.embedding_dim:,} float32 values need "
                f"{size / 2**30:,.0f} GiB; the most that one table may have "
                f"is {MAX_TABLE_BYTES / 2**30:,.0f} GiB. Hash the ids into "
                "fewer rows, or split the table."
            )
        initial_values.check_initializer(
            self.initializer, (self.vocabulary_size, self.embedding_dim), where
        )
        row_optimizers.check_optimizer(self.optimizer, where)

    def get_config(self) -> dict[str, Any]:
        """The fields as Python values that Keras can write and read back."""
        config = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
        }
        config["initializer"] = initial_values.serialize(self.initializer)
        config["optimizer"] = row_optimizers.serialize(
            self.optimizer, f"Table '{self.name}'"
        )
        return config

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TableConfig:
        """The table that `get_config` described; `config` is left as it is."""
        # Keras writes into the config of an optimizer that it reads.
        fields = copy.deepcopy(dict(config))
        fields["initializer"] = initial_values.deserialize(
            fields.get("initializer")
        )
        fields["optimizer"] = row_optimizers.deserialize(
            fields.get("optimizer")
        )
        return cls(**fields)


@dataclasses.dataclass(eq=False)
class FeatureConfig:
    """One input of the layer, and the table it looks up in.

    Args:
        name: Unique within a layer.
        table: The `TableConfig`. Features that name the same object share it.
        input_shape: `(batch,)` or `(batch, width)` of the GLOBAL batch, each
            an int or `None`. A ragged or sparse row longer than `width` is cut
            to it; a dense input must have it.
        output_shape: `(batch, embedding_dim)`: each row of ids is combined
            into one vector. `(batch, positions, embedding_dim)`: nothing is
            combined; each id fills the next position. `None`: combined.

    Raises:
        TypeError: a field of a wrong Python type.
        ValueError: a shape of a wrong rank, or one that contradicts the table
            or the other shape.

    Example:

    ```python
    import tf_distembed as tde

    movie = tde.TableConfig("movie", 1_682, 16)
    watched = tde.FeatureConfig("watched", movie, (64, 20), (64, 16))
    next_up = tde.FeatureConfig("next_up", movie)
    ```
    """

    name: str
    table: TableConfig
    input_shape: Shape | None = None
    output_shape: Shape | None = None

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Checks every field; the layer calls it again when it reads this."""
        _check_name(self.name, "FeatureConfig")
        where = f"Feature '{self.name}'"
        if not isinstance(self.table, TableConfig):
            raise TypeError(
                f"{where}: table must be a TableConfig. "
                f"Received: {_shown(self.table)}"
            )
        self.input_shape = _shape(self.input_shape, "input_shape", where, 1, 2)
        self.output_shape = _shape(
            self.output_shape, "output_shape", where, 2, 3
        )
        if self.output_shape is None:
            return
        if self.output_shape[-1] != self.table.embedding_dim:
            raise ValueError(
                f"{where}: output_shape must end with the embedding_dim of "
                f"table '{self.table.name}', {self.table.embedding_dim}. "
                f"Received: output_shape={self.output_shape}"
            )
        if self.input_shape is None:
            return
        declared = {self.input_shape[0], self.output_shape[0]} - {None}
        if len(declared) > 1:
            raise ValueError(
                f"{where}: input_shape and output_shape must begin with the "
                "same global batch size. Received: input_shape="
                f"{self.input_shape}, output_shape={self.output_shape}"
            )

    def get_config(self) -> dict[str, Any]:
        """The fields as Python values, the table as its own config."""
        return {
            "name": self.name,
            "table": self.table.get_config(),
            "input_shape": None
            if self.input_shape is None
            else list(self.input_shape),
            "output_shape": None
            if self.output_shape is None
            else list(self.output_shape),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> FeatureConfig:
        """The feature that `get_config` described, with a table of its own."""
        config = dict(config)
        if not isinstance(config["table"], TableConfig):
            config["table"] = TableConfig.from_config(config["table"])
        return cls(**config)


def _shown(value: Any) -> str:
    return f"{value!r} (of type {type(value).__name__})"


def _check_name(name: Any, owner: str) -> None:
    if not isinstance(name, str):
        raise TypeError(
            f"{owner}: name must be a string. Received: {_shown(name)}"
        )
    if not name or "/" in name:
        raise ValueError(
            f"{owner}: name must not be empty nor contain '/', since files "
            f"and layers are named after it. Received: {name!r}"
        )


def _check_choice(
    value: Any, choices: Sequence[str], field: str, where: str
) -> None:
    if not isinstance(value, str):
        raise TypeError(
            f"{where}: {field} must be one of {list(choices)}. "
            f"Received: {_shown(value)}"
        )
    if value not in choices:
        raise ValueError(
            f"{where}: {field} must be one of {list(choices)}. "
            f"Received: {field}={value!r}"
        )


def _positive_int(value: Any, field: str, where: str) -> int:
    is_int = isinstance(value, (int, np.integer))
    if not is_int or isinstance(value, (bool, np.bool_)):
        raise TypeError(
            f"{where}: {field} must be an integer. Received: {_shown(value)}"
        )
    if value < 1:
        raise ValueError(
            f"{where}: {field} must be at least 1. Received: {field}={value}"
        )
    return int(value)


def _shape(
    value: Any, field: str, where: str, *ranks: int
) -> tuple[int | None, ...] | None:
    if value is None:
        return None
    try:
        entries = tuple(value)
    except TypeError:
        raise TypeError(
            f"{where}: {field} must be a tuple of ints and Nones. "
            f"Received: {_shown(value)}"
        ) from None
    if len(entries) not in ranks:
        raise ValueError(
            f"{where}: {field} must have "
            f"{' or '.join(map(str, ranks))} entries, the first of them the "
            f"global batch size. Received: {field}={entries}"
        )
    return tuple(
        None if entry is None else _positive_int(entry, field, where)
        for entry in entries
    )
