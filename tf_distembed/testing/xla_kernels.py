"""Which operations a TPU can compile, as far as TensorFlow's wheel knows.

XLA's list for a TPU is in the `tensorflow-tpu` wheel only; its list for a CPU
is in every wheel with XLA. Compared in 2.20 and 2.21, the two agree but for
complex128, which a TPU lacks, and for what `_TPU_ONLY` names.
"""

import contextlib
import functools
import warnings

import tensorflow as tf

from tf_distembed.testing.private_tensorflow import registered_kernels
from tf_distembed.testing.replica_program import is_meeting

_XLA = "XLA_CPU_JIT"
_TPU_ONLY = frozenset({"ResizeNearestNeighborGrad"})
_CPU_ONLY_DTYPES = frozenset({tf.complex128.as_datatype_enum})


def has_kernel(operation: tf.Operation) -> bool:
    """Whether XLA has a kernel for an operation with its dtypes."""
    if is_meeting(operation.type) or operation.type in _TPU_ONLY:
        return True
    kernels = _kernels(operation.type)
    if kernels is None:
        return True
    return any(
        all(
            _dtypes(operation, attribute) <= dtypes
            for attribute, dtypes in kernel.items()
        )
        for kernel in kernels
    )


def _dtypes(operation: tf.Operation, attribute: str) -> set[int]:
    dtypes = operation.get_attr(attribute)
    if isinstance(dtypes, tf.DType):
        dtypes = [dtypes]
    return {dtype.as_datatype_enum for dtype in dtypes}


@functools.cache
def _kernels(op_type: str) -> list[dict[str, set[int]]] | None:
    """The dtypes of each XLA kernel of an operation; None: not known."""
    if not _xla_starts():
        return None
    return [
        {
            constraint.name: set(constraint.allowed_values.list.type)
            - _CPU_ONLY_DTYPES
            for constraint in kernel.constraint
            if constraint.allowed_values.list.type
        }
        for kernel in registered_kernels(op_type)
        if kernel.device_type == _XLA
    ]


@functools.cache
def _xla_starts() -> bool:
    """Makes XLA register its kernels, which it does when it first compiles."""
    # The tensorflow-tpu wheel registers them, and then cannot run on a CPU.
    with (
        contextlib.suppress(tf.errors.OpError),
        tf.init_scope(),
        tf.device("CPU:0"),
    ):
        tf.function(lambda: tf.constant(0) + 1, jit_compile=True)()
    if any(k.device_type == _XLA for k in registered_kernels("MatMul")):
        return True
    warnings.warn(
        "This TensorFlow has no XLA, so sparsecore_emulator cannot tell which "
        "operations a TPU would refuse.",
        stacklevel=2,
    )
    return False
