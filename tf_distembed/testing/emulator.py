"""`sparsecore_emulator`: TPUEmbeddingV2 on chips that are logical CPUs."""

import contextlib
import importlib
import threading
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

# TPUEmbeddingV2 sorts ids into four lists, one for each SparseCore of a chip.
_MAX_SPARSECORES_PER_CHIP = 4

_entering = threading.Lock()


def prepare(num_chips: int = 1) -> None:
    """Makes the logical CPUs that an emulator of `num_chips` chips needs.

    TensorFlow divides the CPU into logical devices when it starts, at the
    first operation, and never again. Call this first in a program, a notebook
    or a `conftest.py`; more logical CPUs than an emulator needs do no harm.

    Args:
        num_chips: Chips of the largest emulator that is to come.

    Raises:
        RuntimeError: TensorFlow has started with fewer.

    Example:

    >>> import tf_distembed as tde
    >>> tde.testing.prepare(2)
    """
    _check_count("num_chips", num_chips)
    cpu = tf.config.list_physical_devices("CPU")[0]
    configured = tf.config.get_logical_device_configuration(cpu) or [None]
    if len(configured) >= num_chips:
        return
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * num_chips
        )
    except RuntimeError as error:
        found = len(tf.config.list_logical_devices("CPU"))
        raise RuntimeError(
            f"An emulator of {num_chips} chips needs {num_chips} logical "
            f"CPUs, and TensorFlow has started with {found}. Put these two "
            "lines first, before anything that makes a tensor, a variable or "
            "a layer:\n"
            "    import tf_distembed as tde\n"
            f"    tde.testing.prepare({num_chips})"
        ) from error


@contextlib.contextmanager
def sparsecore_emulator(
    num_chips: int = 1, sparsecores_per_chip: int = 4
) -> Iterator[tf.distribute.TPUStrategy]:
    """A TPUStrategy with SparseCores, on a machine without a TPU.

    On it `tf.tpu.experimental.embedding.TPUEmbeddingV2`, TensorFlow's own and
    unchanged, builds its sharded tables, looks rows up and updates them, with
    any TensorFlow wheel. So do a Keras model around it, datasets distributed
    by the strategy, metrics, and the rest of TPUStrategy, all of which is
    TensorFlow's own code too.

    What is real: tracing of a replica, once, as TPUStrategy does it; the
    layout of tables over SparseCores; the host's sorting of each batch (with
    TensorFlow's kernels where the wheel has them, in NumPy where not) with
    its limits and error messages; variables, checkpoints, cross-replica sums.
    What stands in: the chips are logical CPUs, and the SparseCores' lookups
    and optimizer steps are ordinary TensorFlow operations.

    It is not kinder than a TPU. After a replica is traced, what it does
    outside `tf.tpu.outside_compilation` (the block in which TPUEmbeddingV2
    sorts a batch) must be possible on a TPU: only operations that XLA
    compiles, for these dtypes; no ragged, sparse or string tensors; no sizes
    that depend on values; no variables made outside the strategy's scope; on
    several chips no dense input of unknown size in a host block, which would
    see TPUStrategy's filling.
    Assertions there do nothing, gathers clamp an index out of range and
    scatters drop it, as on a TPU.

    It cannot show: speed; the order in which a SparseCore adds floats; the
    exchange between chips; memory (HBM) limits; more than one minibatch or
    host; pipelining (`pipeline_execution_with_tensor_core=True` runs in
    sequence, where a TPU's lookups are one step stale). Each step copies
    whole tables, so keep them small.

    Args:
        num_chips: Chips; each runs one replica on one logical CPU. If
            TensorFlow has not started, the logical CPUs are made here, else
            `prepare` must have made them. `num_chips * sparsecores_per_chip`
            must be a power of two for lookups to run, as on a TPU.
        sparsecores_per_chip: SparseCores of each chip: 4 on a TPU v5p, 2 on
            a v6e.

    Yields:
        A `tf.distribute.TPUStrategy`. After the block it, and what was made
        with it, no longer runs.

    Raises:
        RuntimeError: Inside another emulator's block; too few logical CPUs;
            or this TensorFlow lacks something that the emulator replaces.
        ValueError: A count below 1, or more than 4 SparseCores a chip.

    Example:

    >>> import tensorflow as tf
    >>> import tf_distembed as tde
    >>> api = tf.tpu.experimental.embedding
    >>> table = api.TableConfig(
    ...     vocabulary_size=100, dim=8, combiner="sum", name="items",
    ...     initializer=tf.keras.initializers.Ones())
    >>> feature = api.FeatureConfig(table=table, output_shape=[4])
    >>> with tde.testing.sparsecore_emulator() as strategy:
    ...     with strategy.scope():
    ...         embedding = api.TPUEmbeddingV2(feature, api.SGD(0.1))
    ...     ids = tf.ragged.constant([[1, 7], [], [99], [3]], tf.int64)
    ...     @tf.function
    ...     def step(ids):
    ...         def replica(ids):
    ...             activations, lookups = embedding(ids)
    ...             embedding.apply_gradients(
    ...                 tf.ones_like(activations), lookups)
    ...             return activations
    ...         return strategy.run(replica, args=(ids,))
    ...     print(step(ids)[:, 0].numpy())
    ...     print(step(ids)[:, 0].numpy())
    [2. 0. 1. 1.]
    [1.8 0.  0.9 0.9]
    """
    _check_count("num_chips", num_chips)
    _check_count("sparsecores_per_chip", sparsecores_per_chip)
    if sparsecores_per_chip > _MAX_SPARSECORES_PER_CHIP:
        raise ValueError(
            f"TPUEmbeddingV2 knows at most {_MAX_SPARSECORES_PER_CHIP} "
            "SparseCores a chip. Received: sparsecores_per_chip="
            f"{sparsecores_per_chip}"
        )
    inside = _load()
    with contextlib.ExitStack() as stack:
        if not _entering.acquire(blocking=False):
            raise RuntimeError(
                "sparsecore_emulator inside the block of another: leave that "
                "one first. One process emulates one TPU at a time."
            )
        stack.callback(_entering.release)
        prepare(num_chips)
        strategy = inside.EmulatedTPUStrategy(num_chips, sparsecores_per_chip)
        stack.callback(strategy.extended.deactivate)
        for owner, name, value in inside.replacements(strategy):
            stack.callback(setattr, owner, name, getattr(owner, name))
            setattr(owner, name, value)
        yield strategy


def emulator_active(strategy: tf.distribute.Strategy | None = None) -> bool:
    """Whether `strategy` is that of an emulator whose block has not ended.

    Args:
        strategy: The strategy in whose scope the caller is, by default.

    Example:

    >>> import tf_distembed as tde
    >>> with tde.testing.sparsecore_emulator() as strategy:
    ...     tde.testing.emulator_active(strategy)
    True
    >>> tde.testing.emulator_active(strategy)
    False
    """
    strategy = strategy or tf.distribute.get_strategy()
    return bool(getattr(strategy.extended, "emulator_active", False))


def _check_count(name: str, value: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"{name} must be an int of at least 1. Received: {name}={value!r}"
        )


def _load() -> Any:
    """The module that needs TensorFlow's private parts, if they are there."""
    try:
        module = importlib.import_module("tf_distembed.testing.strategy")
        private = importlib.import_module(
            "tf_distembed.testing.private_tensorflow"
        )
        missing = [
            shown
            for owner, name, shown in private.HOOKS
            if not hasattr(owner, name)
        ]
    except (ImportError, AttributeError) as error:
        missing = [str(error)]
    if missing:
        raise RuntimeError(
            "sparsecore_emulator replaces parts of TensorFlow, and TensorFlow "
            f"{tf.__version__} lacks: {'; '.join(missing)}. It is tested with "
            "TensorFlow 2.20 and 2.21."
        )
    return module
