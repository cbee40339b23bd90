"""A TPUStrategy whose chips are logical CPUs.

Everything is TensorFlow's own `TPUStrategy`: scope, variables, datasets,
reductions, and the tracing of a replica through `tpu.replicate`, once, inside
a real `TPUReplicateContext`. Two things differ. The hardware is described by
`hardware` instead of being asked for. And the traced replica, which on a TPU
would be compiled and sent to the chips, is checked (`replica_checks`) and then
built once for each chip out of ordinary CPU operations (`chip_execution`).
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tf_distembed.testing import (
    chip_execution,
    host_kernels,
    replica_checks,
)
from tf_distembed.testing.hardware import (
    EmulatedDeviceAssignment,
    EmulatedResolver,
)
from tf_distembed.testing.private_tensorflow import (
    FuncGraph,
    TPUExtended,
    copy_on_each,
    tpu_embedding_v3,
    tpu_replication,
)
from tf_distembed.testing.replica_program import ReplicaProgram


@dataclasses.dataclass
class _Notes:
    """What is noted while a replica is traced; see `ReplicaProgram`."""

    variables: dict[str, list[tf.Variable]]
    new_handles: list[tf.Tensor]


class EmulatedTPUExtended(TPUExtended):
    """TPUStrategy's inside, with the traced replica run on logical CPUs."""

    def __init__(
        self,
        strategy: tf.distribute.Strategy,
        num_chips: int,
        sparsecores_per_chip: int,
    ) -> None:
        super().__init__(
            strategy,
            EmulatedResolver(num_chips, sparsecores_per_chip),
            device_assignment=EmulatedDeviceAssignment(num_chips),
        )
        self.emulator_active = True
        self._sparsecores_per_chip = sparsecores_per_chip
        self._notes: _Notes | None = None

    def check_active(self) -> None:
        """Raises once the emulator's context is left."""
        if not self.emulator_active:
            raise RuntimeError(
                "This strategy belongs to a sparsecore_emulator whose `with` "
                "block has ended, and so do the layers and functions made "
                "with it. Run them inside the block."
            )

    def deactivate(self) -> None:
        """Called when the emulator's context is left."""
        self.emulator_active = False

    def note_variable(self, handle: tf.Tensor, copies: Any) -> None:
        """Remembers which variable a handle inside the replica stands for."""
        if self._notes is not None:
            self._notes.variables[handle.name] = copy_on_each(
                copies, self.worker_devices
            )

    def _create_variable(
        self, next_creator: Callable[..., Any], **kwargs: Any
    ) -> tf.Variable:
        variable = super()._create_variable(next_creator, **kwargs)
        if self._notes is not None:
            self._notes.new_handles += [
                copy.handle for copy in getattr(variable, "values", ())
            ]
        return variable

    def _tpu_function_creator(
        self, fn: Callable[..., Any], options: tf.distribute.RunOptions
    ) -> Callable[..., Any]:
        # As TPUExtended does: called eagerly, one tf.function for each `fn`.
        if tf.executing_eagerly() and fn in self._tpu_function_cache:
            return self._tpu_function_cache[fn]

        def run_replicas(args: Any, kwargs: Any) -> Any:
            self.check_active()
            program = self._trace(fn, args, kwargs or {}, options)
            dynamic_batch = options.experimental_enable_dynamic_batch_size
            replica_checks.check(program, dynamic_batch=dynamic_batch)
            return chip_execution.build(
                program,
                chips=self.worker_devices,
                host=self._host_device,
                sparsecores_per_chip=self._sparsecores_per_chip,
                guard=self.check_active,
            )

        if not tf.executing_eagerly():
            return run_replicas
        function = tf.function(run_replicas, autograph=False)
        self._tpu_function_cache[fn] = function
        return function

    def _trace(
        self,
        fn: Callable[..., Any],
        args: Any,
        kwargs: dict[str, Any],
        options: tf.distribute.RunOptions,
    ) -> ReplicaProgram:
        """Traces a replica as TPUStrategy does, into a graph of its own."""
        graph = FuncGraph("replica")
        notes = self._notes = _Notes({}, [])
        try:
            with graph.as_default():
                trace = super()._tpu_function_creator(fn, options)
                result = trace(args, kwargs)
        finally:
            self._notes = None
        return ReplicaProgram(
            graph,
            result,
            notes.variables,
            notes.new_handles,
            _composite_inputs(args, kwargs),
        )


class EmulatedTPUStrategy(tf.distribute.TPUStrategy):
    """What `sparsecore_emulator` gives: a TPUStrategy without a TPU."""

    def __init__(self, num_chips: int, sparsecores_per_chip: int) -> None:
        # Past TPUStrategy's own __init__, which would make the real inside.
        tf.distribute.Strategy.__init__(
            self, EmulatedTPUExtended(self, num_chips, sparsecores_per_chip)
        )
        # As in TPUStrategy; TPUEmbeddingV2 reads its shards through it.
        self._enable_packed_variable_in_eager_mode = True

    def run(
        self,
        fn: Callable[..., Any],
        args: Any = (),
        kwargs: Any = None,
        options: tf.distribute.RunOptions | None = None,
    ) -> Any:
        """Runs `fn` on every chip; see `tf.distribute.TPUStrategy.run`.

        Raises:
            RuntimeError: The emulator's context has been left.
            ValueError: `fn` does something that a TPU cannot, outside its
                host block; the message names each operation.
        """
        self.extended.check_active()
        return super().run(fn, args=args, kwargs=kwargs, options=options)


def replacements(
    strategy: EmulatedTPUStrategy,
) -> list[tuple[Any, str, Any]]:
    """What has to be replaced in TensorFlow while the emulator is active.

    Returns:
        Owner, attribute and new value of each.
    """
    context = tpu_replication.TPUReplicateContext
    get_handle = context.get_replicated_var_handle

    def get_replicated_var_handle(
        self: Any,
        name: str,
        handle_id: str,
        vars_: Any,
        is_mirrored: bool = False,
        is_packed: bool = False,
    ) -> tf.Tensor:
        handle = get_handle(
            self, name, handle_id, vars_, is_mirrored, is_packed
        )
        strategy.extended.note_variable(handle, vars_)
        return handle

    replaced: list[tuple[Any, str, Any]] = [
        (context, "get_replicated_var_handle", get_replicated_var_handle)
    ]
    if not host_kernels.wheel_has_host_kernels():
        replaced.append(
            (tpu_embedding_v3, "xla_ops", host_kernels.HostKernels())
        )
    return replaced


def _composite_inputs(args: Any, kwargs: Any) -> list[bool]:
    """For each tensor put into the replica: is it a part of a ragged, ...?

    In the order in which TPUStrategy puts them in: the replica id first, the
    components of RaggedTensor and SparseTensor one by one.
    """
    composite = [False]
    for leaf in tf.nest.flatten(
        tf.nest.map_structure(_first_replica, (args, kwargs))
    ):
        parts = tf.nest.flatten(leaf, expand_composites=True)
        composite += [not (len(parts) == 1 and parts[0] is leaf)] * len(parts)
    return composite


def _first_replica(value: Any) -> Any:
    if isinstance(value, tf.Variable):
        return tf.convert_to_tensor(value)
    if isinstance(value, tf.distribute.DistributedValues):
        return value.values[0]
    return value
