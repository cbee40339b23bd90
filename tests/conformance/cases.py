"""What a case of the registry is: data, and nothing but data.

A case holds three training steps of input for a few features, and the tables
they are looked up in. What must come out is not stored: the reference
computes it, and every backend is compared with that.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import numpy as np

#: Rows of every batch, unless the case's layer has batches of its own.
BATCH = 8

STEPS = 3

DEFAULT_DEVICE = "default_device"
SPARSECORE = "sparsecore"

Id = int
Weight = float


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """An optimizer as data: its formula's name and its settings.

    `rule` is the name of a method of the reference. `maker` says where the
    real object comes from: "name" (the string), "keras" (`keras.optimizers`),
    "native" (`tf.tpu.experimental.embedding`) or "model" (the table has no
    own optimizer; the model's optimizer trains it).
    """

    rule: str
    maker: str
    settings: dict[str, object] = dataclasses.field(default_factory=dict)
    #: Initial value of each slot, by the slot's Keras name.
    slots: dict[str, float] = dataclasses.field(default_factory=dict)
    #: Settings that the real object takes and the formula does not use.
    ignored: dict[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of a case; the registry prefixes `name` with the case's."""

    name: str
    vocabulary: int
    dim: int
    combiner: str = "sum"
    #: Key into `registry.OPTIMIZERS`; None is the layer's usual one.
    optimizer: str | None = None
    trainable: bool = True
    #: Tables of one code start with the same values.
    code: int | None = None

    def initial_values(self) -> np.ndarray:
        """Values `[vocabulary, dim]` that tell table, row and column.

        Multiples of 1/64, so that float32 holds them exactly.
        """
        code = self.code
        if code is None:
            code = zlib.crc32(self.name.encode()) % 13
        rows = np.arange(1, self.vocabulary + 1)[:, None]
        columns = np.arange(self.dim)[None, :]
        return (16.0 * rows + columns % 16 + 5.0 * code) / 64.0


@dataclasses.dataclass(frozen=True)
class Use:
    """One id at one place of a batch."""

    #: Its place in the order in which the batch is fed.
    index: int
    row: int
    column: int
    id: Id
    weight: Weight


@dataclasses.dataclass(frozen=True)
class Feature:
    """A feature of a case and what it is fed, one entry of `ids` a step.

    A step's `ids` are, for `kind`
        dense:  rows of equal length (of one id each if `rank` is 1),
        ragged: rows of any length,
        sparse: (row, column, id) triples in the order they are fed.
    `weights` have the same form, for sparse one number a triple.
    """

    name: str
    table: str
    kind: str
    ids: tuple[Sequence, ...]
    weights: tuple[Sequence, ...] | None = None
    dtype: str = "int64"
    weights_dtype: str = "float32"
    #: True: ragged or sparse weights come as a tensor with row splits or
    #: indices of its own. False: they are `ids.with_values(weights)`.
    weights_apart: bool = False
    rank: int = 2
    #: Columns of the sparse tensor's dense shape.
    columns: int = 16
    row_splits_dtype: str = "int64"
    input_shape: tuple[int | None, ...] | None = None
    output_shape: tuple[int | None, ...] | None = None
    invalid_ids: str = "error"
    #: False: the loss does not depend on the feature's output.
    in_loss: bool = True
    #: True: the gradient with respect to the weights is compared too.
    weights_gradient: bool = False

    def uses(self, step: int) -> list[Use]:
        """What the step feeds, in the order in which it is fed."""
        ids = self.ids[step]
        if self.kind == "sparse":
            weights = self.weights[step] if self.weights else [1] * len(ids)
            return [
                Use(index, *cell, weight)
                for index, (cell, weight) in enumerate(
                    zip(ids, weights, strict=True)
                )
            ]
        weights = (
            self.weights[step] if self.weights else [[1] * len(r) for r in ids]
        )
        uses = [
            (row, column, value, weights[row][column])
            for row, bag in enumerate(ids)
            for column, value in enumerate(bag)
        ]
        return [Use(index, *use) for index, use in enumerate(uses)]

    @property
    def width(self) -> int | None:
        """Declared number of ids of a row; ragged and sparse are cut to it."""
        if self.kind == "dense" or self.input_shape is None:
            return None
        return self.input_shape[1] if len(self.input_shape) == 2 else None

    @property
    def positions(self) -> int | None:
        """S of an unreduced output `(B, S, D)`, None if reduced."""
        shape = self.output_shape
        return shape[1] if shape is not None and len(shape) == 3 else None


@dataclasses.dataclass(frozen=True)
class Case:
    """Some features on some tables, and the rules that they show."""

    name: str
    layer: str
    tables: tuple[Table, ...]
    features: tuple[Feature, ...]
    #: Names in `breaks.BREAKS`: with a rule broken so, the case fails.
    shows: tuple[str, ...]
    batches: tuple[int, ...] = (BATCH,) * STEPS
    #: Families of backends on which it holds; `reason` when not on all.
    backends: tuple[str, ...] = (DEFAULT_DEVICE, SPARSECORE)
    reason: str = ""
    #: Holds only where XLA compiles the step.
    only_compiled: bool = False

    @property
    def dense(self) -> bool:
        """Whether all inputs are dense: what XLA compiles."""
        return all(f.kind == "dense" for f in self.features)

    def table(self, name: str) -> Table:
        """The table of that name."""
        return next(t for t in self.tables if t.name == name)


@dataclasses.dataclass(frozen=True)
class Layer:
    """The cases that one layer runs together."""

    name: str
    cases: tuple[Case, ...]
    batches: tuple[int, ...]
    #: Arguments of DistributedEmbedding beside the features.
    settings: dict[str, object]
    #: The optimizer of the model, for tables that have none.
    model_optimizer: Optimizer

    @property
    def features(self) -> tuple[Feature, ...]:
        """The features of all its cases."""
        return tuple(f for case in self.cases for f in case.features)

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables of all its cases."""
        return tuple(t for case in self.cases for t in case.tables)


def output_gradient(
    feature: Feature, step: int, batch: int, dim: int
) -> np.ndarray:
    """The loss's coefficients for a feature's output, exact in float32.

    The loss is the sum over all features of sum(output * coefficients), so
    each element of each output has a gradient of its own. The coefficients
    are never near zero, nor do few of them cancel.
    """
    shape = (batch, dim)
    if feature.positions is not None:
        shape = (batch, feature.positions, dim)
    seed = zlib.crc32(f"{feature.name} {step}".encode())
    draw = np.random.default_rng(seed)
    sizes = np.round(draw.uniform(0.3, 1.3, shape) * 4096) / 4096
    return sizes * draw.choice([-1.0, 1.0], shape, p=[0.25, 0.75])
