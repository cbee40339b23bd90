"""The inputs of a layer: nested like its features, or preprocessed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

import keras
import tensorflow as tf

from tf_distembed import structures
from tf_distembed.features import Feature
from tf_distembed.inputs import DENSE, as_tensor, check_feature, kind_of

PREPROCESSED = "preprocessed_inputs_per_placement"


class LayerInputs:
    """Ids and weights of a layer's features, in flat order, out of its inputs.

    Args:
        structure: What the features were nested in; its leaves are not read.
        features: The features in flat order.
        per_placement: Placement -> the features looked up there.
    """

    def __init__(
        self,
        structure: Any,
        features: Sequence[Feature],
        per_placement: Mapping[str, Sequence[Feature]],
    ) -> None:
        self._structure = structure
        self._features = features
        places = {f.name: i for i, f in enumerate(features)}
        self.positions = {
            placement: [places[f.name] for f in part]
            for placement, part in per_placement.items()
        }

    @staticmethod
    def is_preprocessed(inputs: Any) -> bool:
        """Whether `inputs` came out of `preprocess`."""
        return isinstance(inputs, Mapping) and set(inputs) == {PREPROCESSED}

    def read(self, inputs: Any, weights: Any) -> tuple[list[Any], list[Any]]:
        """Checked ids and weights (or None) of all features."""
        if self.is_preprocessed(inputs):
            if weights is not None:
                raise ValueError(
                    "Preprocessed inputs hold their weights; pass weights to "
                    "preprocess, not beside its result."
                )
            ids, weight = self._unpack(inputs[PREPROCESSED])
        else:
            ids = structures.flatten_up_to(self._structure, inputs, "inputs")
            weight = [None] * len(ids)
            if weights is not None:
                weight = structures.flatten_up_to(
                    self._structure, weights, "weights"
                )
        for i, feature in enumerate(self._features):
            ids[i] = as_tensor(feature, ids[i])
            if weight[i] is not None:
                weight[i] = as_tensor(feature, weight[i], "weights")
            check_feature(feature, ids[i], weight[i])
        return ids, weight

    def preprocess(self, inputs: Any, weights: Any) -> dict[str, Any]:
        """The same in a form that `read` takes without further work."""
        if self.is_preprocessed(inputs):
            raise ValueError(
                "preprocess received inputs that it has already preprocessed. "
                "Pass them to the layer."
            )
        ids, weight = self.read(inputs, weights)
        per_placement = {}
        for placement, where in self.positions.items():
            # Tuples: tf.data would stack the tensors of a list into one.
            part: dict[str, Any] = {"inputs": tuple(ids[i] for i in where)}
            if any(weight[i] is not None for i in where):
                part["weights"] = tuple(
                    _ones_like(self._features[i], ids[i])
                    if weight[i] is None
                    else weight[i]
                    for i in where
                )
            per_placement[placement] = part
        return {PREPROCESSED: per_placement}

    def _unpack(self, per_placement: Any) -> tuple[list[Any], list[Any]]:
        ids: list[Any] = [None] * len(self._features)
        weights: list[Any] = [None] * len(self._features)
        _check_keys(per_placement, PREPROCESSED, set(self.positions))
        for placement, where in self.positions.items():
            part = per_placement[placement]
            _check_keys(part, placement, {"inputs"}, {"weights"})
            for key, target in (("inputs", ids), ("weights", weights)):
                values = part.get(key, [None] * len(where))
                if not isinstance(values, (list, tuple)) or (
                    len(values) != len(where)
                ):
                    names = [self._features[i].name for i in where]
                    raise ValueError(
                        f"The preprocessed {key} of placement '{placement}' "
                        f"must be a tuple of {len(where)}, one for each of "
                        f"the features {names}. Received: {values!r}"
                    )
                for i, value in zip(where, values, strict=True):
                    target[i] = value
        return ids, weights


def _check_keys(
    value: Any, what: str, keys: set[str], optional: Set[str] = frozenset()
) -> None:
    """Raises unless a part of the preprocessed inputs is a dict of `keys`."""
    if not isinstance(value, Mapping) or not (
        keys <= set(value) <= keys | optional
    ):
        received = list(value) if isinstance(value, Mapping) else value
        raise ValueError(
            f"Preprocessed inputs: '{what}' must be a dict with the keys "
            f"{sorted(keys)}"
            + (f" and perhaps {sorted(optional)}" if optional else "")
            + f". Received: {received!r}. Pass on what this layer's "
            "preprocess returned."
        )


def _ones_like(feature: Feature, ids: Any) -> Any:
    """Weights of 1 beside `ids`."""
    if isinstance(ids, keras.KerasTensor):
        if kind_of(ids) != DENSE:
            raise ValueError(
                f"{feature.where}: preprocess needs weights for every feature "
                "or for none if a Keras tensor is ragged or sparse. Pass "
                "weights of 1 for this feature."
            )
        return keras.ops.ones_like(ids, dtype="float32")
    if isinstance(ids, tf.SparseTensor):
        return ids.with_values(tf.ones_like(ids.values, tf.float32))
    if isinstance(ids, tf.RaggedTensor):
        return ids.with_values(tf.ones_like(ids.values, tf.float32))
    return tf.ones_like(ids, tf.float32)
