"""What TPUEmbeddingV2 must compute, with dense tables in float64.

No stacking, no shards, no chips: a table is one array, and a step gets all
entries of all chips at once.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import tensorflow as tf


@dataclasses.dataclass
class Bags:
    """The ids and weights of each sample of one feature on one chip."""

    ids: list[list[int]]
    weights: list[list[float]]

    def coefficients(self, combiner: str) -> list[np.ndarray]:
        """What each id counts in its sample."""
        result = []
        for given in self.weights:
            w = np.asarray(given, np.float64)
            if combiner == "mean":
                w = w / w.sum() if w.size else w
            elif combiner == "sqrtn":
                w = w / np.sqrt((w * w).sum()) if w.size else w
            result.append(w)
        return result


class Table:
    """One table, its slots, and the gradient of the step being taken."""

    def __init__(self, values: np.ndarray, slots: list[np.ndarray]) -> None:
        self.values = values.astype(np.float64)
        self.slots = [slot.astype(np.float64) for slot in slots]
        self.gradient = np.zeros_like(self.values)
        self.touched: set[int] = set()

    def lookup(self, bags: Bags, combiner: str) -> np.ndarray:
        out = np.zeros((len(bags.ids), self.values.shape[1]))
        for sample, (ids, c) in enumerate(
            zip(bags.ids, bags.coefficients(combiner), strict=True)
        ):
            for i, each in zip(ids, c, strict=True):
                out[sample] += each * self.values[i]
        return out

    def accumulate(
        self, bags: Bags, combiner: str, gradient: np.ndarray
    ) -> None:
        for sample, (ids, c) in enumerate(
            zip(bags.ids, bags.coefficients(combiner), strict=True)
        ):
            for i, each in zip(ids, c, strict=True):
                self.gradient[i] += each * gradient[sample]
                self.touched.add(i)

    def step(self, optimizer: object, learning_rate: float) -> None:
        """One step on the touched rows."""
        rows = sorted(self.touched)
        state = [self.values[rows], *(slot[rows] for slot in self.slots)]
        moved = STEPS[type(optimizer).__name__](
            optimizer, self.gradient[rows], state, learning_rate
        )
        for array, new in zip([self.values, *self.slots], moved, strict=True):
            array[rows] = new
        self.gradient[:] = 0
        self.touched.clear()


def _sgd(o, g, state, lr):
    return [state[0] - lr * g]


def _adagrad(o, g, state, lr):
    w, a = state
    a = a + g * g
    return [w - lr * g / np.sqrt(a), a]


def _adagrad_momentum(o, g, state, lr):
    w, a, m = state
    a = a + g * g if o.beta2 == 1 else o.beta2 * a + (1 - o.beta2) * g * g
    s = g / (a + o.epsilon) ** (1 / o.exponent)
    m = o.momentum * m + s
    return [w - lr * (o.momentum * m + s if o.use_nesterov else m), a, m]


def _adam(o, g, state, lr):
    w, m, v = state
    m = o.beta_1 * m + (1 - o.beta_1) * g
    v = o.beta_2 * v + (1 - o.beta_2) * g * g
    if o.sum_inside_sqrt:
        return [w - lr * m / np.sqrt(v + o.epsilon**2), m, v]
    return [w - lr * m / (np.sqrt(v) + o.epsilon), m, v]


def _ftrl(o, g, state, lr):
    w, a0, z = state
    a = a0 + g * g
    power = -o.learning_rate_power
    z = z + g - (a**power - a0**power) * w / lr
    l1, l2 = o.l1_regularization_strength, o.l2_regularization_strength
    root = (a**power + o.beta) / lr + 2 * l2
    w = np.where(np.abs(z) <= l1, 0.0, (np.sign(z) * l1 - z) / root)
    return [w, a, z]


STEPS = {
    "SGD": _sgd,
    "Adagrad": _adagrad,
    "AdagradMomentum": _adagrad_momentum,
    "Adam": _adam,
    "FTRL": _ftrl,
}


def read_table(
    embedding: object, name: str, slot: str = "parameters"
) -> np.ndarray:
    """One table, or slot, out of the sharded stack of a TPUEmbeddingV2."""
    layout = embedding.embedding_layouts[name]
    shards = _shards(embedding.variables[layout.stacked_table_name][slot])
    size, width = layout.unsharded_shape
    shard, row = _places(layout, np.arange(size))
    return shards.reshape(layout.num_sparse_cores, -1, shards.shape[1])[
        shard, row, :width
    ]


def write_table(embedding: object, name: str, values: np.ndarray) -> None:
    """Puts values into a table of a TPUEmbeddingV2."""
    layout = embedding.embedding_layouts[name]
    variable = embedding.variables[layout.stacked_table_name]["parameters"]
    shards = _shards(variable)
    cube = shards.reshape(layout.num_sparse_cores, -1, shards.shape[1])
    shard, row = _places(layout, np.arange(len(values)))
    cube[shard, row, : values.shape[1]] = values
    for copy, part in zip(
        variable.values, np.split(shards, len(variable.values)), strict=True
    ):
        copy.assign(part)


def _shards(variable: tf.Variable) -> np.ndarray:
    return np.concatenate([copy.numpy() for copy in variable.values])


def _places(layout: object, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    cores = layout.num_sparse_cores
    return (
        (ids + layout.sparse_core_shard_rotation) % cores,
        ids // cores + layout.sparse_core_shard_row_offset,
    )
