"""`DistributedEmbedding`: nested features, shared tables, any device."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tf_distembed import layer_config, placements, structures
from tf_distembed.backends import compilation
from tf_distembed.backends.base import Backend
from tf_distembed.backends.factory import make_backends
from tf_distembed.backends.stack_lookup import RowReader, StackLookup, tie
from tf_distembed.features import Feature, read_features
from tf_distembed.inputs import DENSE, kind_of
from tf_distembed.layer_inputs import PREPROCESSED, LayerInputs
from tf_distembed.stacking import check_stacking, make_stacks
from tf_distembed.table_state import (
    CheckpointIndex,
    TableState,
    keep_out_of_checkpoints,
)
from tf_distembed.tables import STEP, VALUES


class _Parts:
    """What the layer is made of, kept from Keras' and TensorFlow's tracking.

    Tables reach files by name, through the layer's own saving methods; were
    these objects attributes, their variables would be written as well.
    """

    structure: Any
    features: list[Feature]
    inputs: LayerInputs
    compiles_once = True
    backends: dict[str, Backend]
    state: TableState
    checkpoint_index: CheckpointIndex
    reading: StackLookup | None = None


@keras.saving.register_keras_serializable(package="tf_distembed")
class DistributedEmbedding(keras.layers.Layer):
    """Looks up nested features in shared tables and combines them.

    Each table is trained by its own optimizer, which takes one step on the
    rows that a batch touches, whatever the size of the table:

    ```
    ids of a feature     table            output
    [[7, 7], [], [3]] -> rows 7, 3 ---->  [mean(e7, e7), 0, e3]
    ```

    Args:
        feature_configs: A nested structure (dict, list, tuple, namedtuple) of
            `FeatureConfig`, or a single one. Inputs, weights and outputs have
            the same structure. A `tf.tpu.experimental.embedding.FeatureConfig`
            may stand for one.
        table_stacking: Which tables are looked up together: `"auto"` (those
            of equal width and optimizer), None (each alone), or lists of
            table names. It never changes a result.
        invalid_ids: What becomes of an id outside its table: `"error"`
            raises, `"drop"` removes the id from its bag. Or a dict {feature
            name: policy}, `"error"` for those left out.
        update_stats: SparseCore only: measure the limits while training.
        optimizer: The optimizer of tables whose own is None. Without it, the
            model's optimizer trains those.
        pipeline_execution_with_tensor_core: SparseCore only.
        sparse_core_embedding_config: SparseCore only; a
            `tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig`.
        **layer_kwargs: `name`, `dtype`, `trainable`, as of any layer.

    Call arguments:
        inputs: For each feature ids of an integer dtype: dense `[B]` or
            `[B, S]`, ragged or sparse `[B, S]`; or the result of `preprocess`.
        weights: For each feature None, or weights of the same kind and shape
            as its ids. None: all weights are 1.
        training: Whether a training step is being taken.

    Call output: for each feature `[B, embedding_dim]`, or
        `[B, positions, embedding_dim]` if its `output_shape` says so, of the
        layer's compute dtype.

    Raises:
        TypeError: a wrong type or dtype, naming the feature or table.
        ValueError: a wrong value, shape, name or setting, likewise.
        tf.errors.InvalidArgumentError: when run, an id outside its table.

    Example:

    ```python
    import keras
    import tensorflow as tf
    import tf_distembed as tde

    movie = tde.TableConfig("movie", 100, 4, optimizer="adagrad")
    layer = tde.DistributedEmbedding({
        "next": tde.FeatureConfig("next", movie),
        "seen": tde.FeatureConfig("seen", movie),
    })
    outputs = layer({
        "next": tf.constant([7, 3]),
        "seen": tf.ragged.constant([[7, 7, 5], []], dtype=tf.int64),
    })
    assert outputs["seen"].shape == (2, 4)
    ```
    """

    def __init__(
        self,
        feature_configs: Any,
        *,
        table_stacking: Any = "auto",
        invalid_ids: Any = "error",
        update_stats: bool = False,
        optimizer: Any = None,
        pipeline_execution_with_tensor_core: bool = False,
        sparse_core_embedding_config: Any = None,
        **layer_kwargs: Any,
    ) -> None:
        super().__init__(autocast=False, **layer_kwargs)
        # Ids are never cast; `__call__` converts what is no tensor yet.
        self._convert_input_args = False
        # Until the kinds of all features are known.
        self.supports_jit = False
        _check_variables_can_be_made(self.name)
        settings = layer_config.Settings(
            table_stacking=table_stacking,
            invalid_ids=invalid_ids,
            update_stats=update_stats,
            optimizer=optimizer,
            pipeline_execution_with_tensor_core=(
                pipeline_execution_with_tensor_core
            ),
            sparse_core_embedding_config=sparse_core_embedding_config,
        )
        leaves = layer_config.feature_leaves(
            feature_configs, PREPROCESSED, self.variable_dtype
        )
        features, tables = read_features(leaves, invalid_ids)
        check_stacking(table_stacking, [table.name for table in tables])
        placed = placements.place(tables, settings)
        optimizers = layer_config.table_optimizers(tables, settings.optimizer)
        parts = _Parts()
        parts.structure = structures.map_leaves(feature_configs, lambda _: None)
        parts.features = features
        with keras.name_scope(self.name, caller=self):
            parts.backends = make_backends(
                placed,
                features,
                optimizers,
                settings,
                self.variable_dtype,
                self.name,
            )
        parts.inputs = LayerInputs(
            parts.structure,
            features,
            {key: one.features for key, one in parts.backends.items()},
        )
        parts.state = TableState(list(parts.backends.values()))
        parts.checkpoint_index = CheckpointIndex(parts.state, self.name)
        self._settings = settings
        self._parts = parts
        # Where Keras finds variables: a sub-layer a table, or what stands for
        # tables that are no Keras variables.
        found = [backend.keras_parts() for backend in parts.backends.values()]
        by_name = {k: part for one in found for k, part in one.items()}
        order = [table.name for table in tables]
        self._table_layers = [by_name[k] for k in order if k in by_name]
        self._other_variables = [
            part for k, part in by_name.items() if k not in order
        ]
        for variable in self.weights:
            keep_out_of_checkpoints(variable)
        self.built = True

    @classmethod
    def has_sparsecores(cls) -> bool:
        """Whether the strategy in scope is that of a TPU with SparseCores."""
        return placements.has_sparsecores()

    @property
    def table_optimizers(self) -> Mapping[str, Any]:
        """Table name -> the optimizer in use.

        Reassign `.learning_rate` on these, also between compiled steps.
        Tables that the model's optimizer trains are not in it.
        """
        # Not a dict: Keras would save the optimizers in it.
        return types.MappingProxyType(
            {
                name: optimizer
                for backend in self._parts.backends.values()
                for name, optimizer in backend.optimizers.items()
            }
        )

    def preprocess(
        self, inputs: Any, weights: Any = None, training: bool = False
    ) -> dict[str, Any]:
        """Inputs in the form that the layer takes without further work.

        May run in `tf.data.Dataset.map`; accepts what the layer accepts, and
        Keras tensors. Lists and object arrays of unequal rows become ragged.

        Args:
            inputs: As the layer's.
            weights: As the layer's.
            training: As the layer's.

        Returns:
            `{"preprocessed_inputs_per_placement": {placement: {"inputs":
            (...), "weights": (...)}}}`, tuples in flat feature order. Without
            weights, `"weights"` is left out; if only some features have
            weights, the others get weights of 1.

        Raises:
            TypeError, ValueError: as a call of the layer does.
        """
        prepared = self._parts.inputs.preprocess(inputs, weights)
        self._note_kinds(
            one
            for part in prepared[PREPROCESSED].values()
            for one in part["inputs"]
        )
        return prepared

    @tf.autograph.experimental.do_not_convert
    def __call__(
        self, inputs: Any, weights: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Calls the layer; see the class."""
        # Keras takes no mixture of tensors, arrays and lists of ids.
        if not self._parts.inputs.is_preprocessed(inputs):
            ids, weight = self._flat_inputs(inputs, weights)
            inputs = structures.pack(self._parts.structure, ids)
            if weights is not None:
                weights = structures.pack(self._parts.structure, weight)
        return super().__call__(inputs, weights, *args, **kwargs)

    @tf.autograph.experimental.do_not_convert
    def call(
        self, inputs: Any, weights: Any = None, training: bool = False
    ) -> Any:
        """Looks up and combines; see the class."""
        ids, weight = self._flat_inputs(inputs, weights)
        outputs: list[Any] = [None] * len(ids)
        if self._parts.reading is not None:
            found = self._parts.reading(ids, weight, unique=False)
            outputs = [tf.cast(one, self.compute_dtype) for one in found]
            return structures.pack(self._parts.structure, outputs)
        if compilation.infers_shapes():
            outputs = [
                self._zeros(feature, one)
                for feature, one in zip(self._parts.features, ids, strict=True)
            ]
            return structures.pack(self._parts.structure, outputs)
        for placement, backend in self._parts.backends.items():
            where = self._parts.inputs.positions[placement]
            found = backend.lookup(
                [ids[i] for i in where],
                [weight[i] for i in where],
                bool(training),
            )
            for i, output in zip(where, found, strict=True):
                outputs[i] = output
        if len(self._parts.backends) > 1:
            outputs = tie(outputs)
        outputs = [tf.cast(one, self.compute_dtype) for one in outputs]
        return structures.pack(self._parts.structure, outputs)

    def compute_output_spec(
        self, inputs: Any, weights: Any = None, training: bool = False
    ) -> Any:
        """Keras tensors of the outputs; they carry the inputs' batch."""
        ids, _ = self._flat_inputs(inputs, weights)
        specs = [
            keras.KerasTensor(
                feature.output_shape_for(tuple(x.shape)), self.compute_dtype
            )
            for feature, x in zip(self._parts.features, ids, strict=True)
        ]
        return structures.pack(self._parts.structure, specs)

    def compute_output_shape(self, input_shapes: Any) -> Any:
        """Shapes of the outputs for shapes of the inputs."""
        flat = structures.flatten_up_to(
            self._parts.structure, input_shapes, "input shapes"
        )
        return structures.pack(
            self._parts.structure,
            [
                feature.output_shape_for(tuple(shape))
                for feature, shape in zip(
                    self._parts.features, flat, strict=True
                )
            ],
        )

    def get_embedding_tables(self) -> dict[str, tf.Tensor]:
        """Table name -> a copy of its values.

        Each is `[vocabulary_size, embedding_dim]`, without any padding.
        """
        state = self._parts.state
        return {
            entry.table: state.read(entry)
            for entry in state.entries()
            if entry.slot == VALUES
        }

    def set_embedding_tables(
        self, tables: Mapping[str, Any], *, reset_slots: bool = False
    ) -> None:
        """Sets the values of some tables, or of some of their rows.

        Args:
            tables: {table name: array `[vocabulary_size, embedding_dim]`}, or
                {table name: (row ids `[R]`, values `[R, embedding_dim]`)}.
            reset_slots: Whether the optimizer's slots of the same rows start
                again; for whole tables, the step count too.

        Raises:
            TypeError: no dict, or values that are no numbers.
            ValueError: an unknown table, a wrong shape or row id. Nothing is
                set then.
        """
        if not isinstance(tables, Mapping):
            raise TypeError(
                "tables must be a dict {table name: values, or (row ids, "
                f"values)}}. Received: {tables!r} (of type "
                f"{type(tables).__name__})"
            )
        state = self._parts.state
        shapes = {e.table: e.shape for e in state.entries() if e.slot == VALUES}
        changes = [
            (name, *layer_config.rows_and_values(name, given, shapes))
            for name, given in tables.items()
        ]
        by_table = {e.table: e for e in state.entries() if e.slot == VALUES}
        for name, ids, values in changes:
            if ids is None:
                state.write(by_table[name], values)
            else:
                state.write_rows(name, VALUES, ids, values)
            if reset_slots:
                state.reset_rows(name, ids)

    def get_optimizer_state(self) -> dict[str, dict[str, Any]]:
        """Table name -> {slot name: copy of the slot, "step": int}.

        Slots have Keras' names and the table's shape. Tables without an
        optimizer of their own are left out.
        """
        state = self._parts.state
        found: dict[str, dict[str, Any]] = {}
        for entry in state.entries():
            if entry.slot == STEP:
                step = int(state.read(entry))
                found.setdefault(entry.table, {})[STEP] = step
            elif entry.slot != VALUES:
                slots = found.setdefault(entry.table, {})
                slots[entry.slot] = state.read(entry)
        return found

    def id_statistics(self, reset: bool = False) -> dict[str, Any]:
        """What was counted of the ids fed since the last reset.

        Args:
            reset: Whether to start again from 0.

        Returns:
            `{"dropped": {feature name: number of dropped ids}}`.
        """
        counters: list[Any] = [
            one.dropped for one in self._parts.backends.values()
        ]
        counts = {k: n for one in counters for k, n in one.read().items()}
        statistics: dict[str, Any] = {
            "dropped": {f.name: counts[f.name] for f in self._parts.features}
        }
        measured = [
            one.limit_statistics
            for one in self._parts.backends.values()
            if one.limit_statistics is not None
        ]
        if measured:
            statistics["limits"] = [x for one in measured for x in one.read()]
            counters += measured
        if reset:
            for one in counters:
                one.reset()
        return statistics

    def table_state(self) -> TableState:
        """The logical state of the tables, for saving and loading."""
        return self._parts.state

    @contextlib.contextmanager
    def reading_rows(self, readers: Mapping[str, RowReader]) -> Iterator[None]:
        """While entered, the layer only looks up, in rows from `readers`.

        An export traces a model so: whatever the placement of a table, its
        features are looked up on the device in use, and nothing is counted.

        Args:
            readers: For each table a function from ids `[N]` to rows
                `[N, embedding_dim]`.
        """
        parts = self._parts
        tables = list(dict.fromkeys(f.table for f in parts.features))
        widths = {t.name: {"embedding_dim": t.embedding_dim} for t in tables}
        stacks = make_stacks(tables, parts.features, "auto", widths)
        parts.reading = StackLookup(parts.features, stacks, readers, None)
        try:
            yield
        finally:
            parts.reading = None

    def get_config(self) -> dict[str, Any]:
        """The configuration, with each shared table and optimizer once."""
        config = super().get_config()
        config.pop("autocast", None)
        return {
            **config,
            **layer_config.encode(
                self._parts.structure,
                self._parts.features,
                dict(self.table_optimizers),
                self._settings,
            ),
        }

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DistributedEmbedding:
        """The layer that `get_config` described; `config` is left as it is."""
        return cls(**layer_config.decode(config))

    def save_own_variables(self, store: Any) -> None:
        """Writes the logical state; Keras calls it."""
        state = self._parts.state
        for entry in state.entries():
            store[entry.key] = np.asarray(state.read(entry))

    def load_own_variables(self, store: Any) -> None:
        """Loads the logical state, all of it or nothing; Keras calls it."""
        found = {key: store[key] for key in store.keys()}  # noqa: SIM118
        self._parts.state.load(found, f"The file read by layer '{self.name}'")

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return self._parts.state.tensors()

    def _restore_from_tensors(self, restored: Mapping[str, tf.Tensor]) -> None:
        state = self._parts.state
        found = {e.key: restored[e.checkpoint_key] for e in state.entries()}
        state.load(found, f"The checkpoint read by layer '{self.name}'")

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        # A checkpoint holds the logical state alone; a SavedModel needs every
        # variable that its functions use.
        if save_type == "checkpoint":
            return {"table_index": self._parts.checkpoint_index}
        children = super()._trackable_children(save_type, **kwargs)
        for placement, backend in self._parts.backends.items():
            if isinstance(backend.dropped.counts, tf.Variable):
                children[f"_dropped_ids_{placement}"] = backend.dropped.counts
        return children

    def _zeros(self, feature: Feature, ids: Any) -> tf.Tensor:
        """What has the shape and dtype of a feature's output."""
        static = feature.output_shape_for(tuple(ids.shape))
        if isinstance(ids, tf.SparseTensor):
            dynamic = ids.dense_shape
        elif isinstance(ids, tf.RaggedTensor):
            dynamic = ids.bounding_shape()
        else:
            dynamic = tf.shape(ids)
        shape = [
            dynamic[i] if size is None else size
            for i, size in enumerate(static)
        ]
        zeros = tf.zeros(tf.stack(shape), self.compute_dtype)
        return tf.ensure_shape(zeros, static)

    def _flat_inputs(
        self, inputs: Any, weights: Any
    ) -> tuple[list[Any], list[Any]]:
        """Checked tensors of all features, in flat order."""
        ids, weight = self._parts.inputs.read(inputs, weights)
        self._note_kinds(ids)
        return ids, weight

    def _note_kinds(self, ids: Iterable[Any]) -> None:
        """Whether XLA may compile a model that holds the layer."""
        if any(kind_of(one) != DENSE for one in ids):
            # XLA would compile anew for every number of ids.
            self._parts.compiles_once = False
        self.supports_jit = self._parts.compiles_once


def _check_variables_can_be_made(name: str) -> None:
    """Raises where Keras calls layers without letting them make variables."""
    try:
        with tf.init_scope():
            keras.Variable(0, dtype="int32", trainable=False)
    except ValueError as error:
        raise ValueError(
            f"The layer '{name}' cannot make its tables here, where Keras "
            "infers the shapes of another layer's outputs. Make the layer in "
            "the __init__ of the model or layer that uses it, not in its "
            "build or call."
        ) from error
