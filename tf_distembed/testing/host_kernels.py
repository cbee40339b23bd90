"""TensorFlow's SparseCore host operations where the wheel has no kernels.

Only the `tensorflow-tpu` wheel has kernels for them. `HostKernels` stands in
for the module of TensorFlow from which TPUEmbeddingV2 takes its operations,
and does the four host operations in NumPy; every other is TensorFlow's own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_distembed.testing import csr_buffers, host_ops
from tf_distembed.testing.private_tensorflow import (
    gen_xla_ops,
    registered_kernels,
)


def wheel_has_host_kernels() -> bool:
    """Whether TensorFlow's own host operations can run."""
    return bool(registered_kernels("ConvertToListOfSparseCoreCooTensors"))


class HostKernels:
    """Stands where TPUEmbeddingV2 has its module of operations."""

    def __getattr__(self, name: str) -> Any:
        return getattr(gen_xla_ops, name)

    def convert_to_list_of_sparse_core_coo_tensors(
        self,
        *,
        indices_or_row_splits: tf.Tensor,
        values: tf.Tensor,
        weights: tf.Tensor,
        num_sc_per_chip: int,
        **attributes: Any,
    ) -> tuple[list[tf.Tensor], list[tf.Tensor], list[tf.Tensor]]:
        """See `host_ops.convert_to_list_of_coo`."""

        def run(*inputs: np.ndarray) -> list[np.ndarray]:
            parts = host_ops.convert_to_list_of_coo(
                *inputs, num_sc_per_chip=num_sc_per_chip, **attributes
            )
            return [array for part in parts for array in part]

        flat = _call(
            run,
            [indices_or_row_splits, values, weights],
            [tf.int32] * (2 * num_sc_per_chip) + [tf.float32] * num_sc_per_chip,
            [[None]] * (3 * num_sc_per_chip),
        )
        return (
            flat[:num_sc_per_chip],
            flat[num_sc_per_chip : 2 * num_sc_per_chip],
            flat[2 * num_sc_per_chip :],
        )

    def sort_list_of_sparse_core_coo_tensors(
        self,
        *,
        row_ids_list: Sequence[tf.Tensor],
        col_ids_list: Sequence[tf.Tensor],
        gains_list: Sequence[tf.Tensor],
        num_replica: int,
        num_sc_per_chip: int,
        **attributes: Any,
    ) -> list[tf.Tensor]:
        """See `host_ops.sort_list_of_coo`."""
        attributes |= {
            "num_replica": num_replica,
            "num_sc_per_chip": num_sc_per_chip,
        }
        return _call(
            _on_lists(host_ops.sort_list_of_coo, 3, attributes),
            [*row_ids_list, *col_ids_list, *gains_list],
            [tf.int32, tf.int32, tf.float32, tf.int32],
            [[None], [None], [None], [num_replica * num_sc_per_chip + 1]],
        )

    def get_stats_from_list_of_sparse_core_coo_tensors(
        self,
        *,
        row_ids_list: Sequence[tf.Tensor],
        col_ids_list: Sequence[tf.Tensor],
        gains_list: Sequence[tf.Tensor],
        **attributes: Any,
    ) -> list[tf.Tensor]:
        """See `host_ops.stats_of_coo`."""
        return _call(
            _on_lists(host_ops.stats_of_coo, 3, attributes),
            [*row_ids_list, *col_ids_list, *gains_list],
            [tf.int32, tf.int32],
            [[], []],
        )

    def convert_to_sparse_core_csr_wrapped_coo_tensor(
        self,
        *,
        sorted_row_ids_list: Sequence[tf.Tensor],
        sorted_col_ids_list: Sequence[tf.Tensor],
        sorted_gains_list: Sequence[tf.Tensor],
        id_counts_list: Sequence[tf.Tensor],
        splits: tf.Tensor,
        **attributes: Any,
    ) -> list[tf.Tensor]:
        """See `csr_buffers.to_csr`; `splits` serves several minibatches."""
        del splits
        return _call(
            _on_lists(csr_buffers.to_csr, 4, attributes),
            [
                *sorted_row_ids_list,
                *sorted_col_ids_list,
                *sorted_gains_list,
                *id_counts_list,
            ],
            [tf.int32] * 3 + [tf.float32] + [tf.int32] * 3,
            [[None]] * 4 + [[]] * 3,
        )


def _on_lists(
    function: Callable[..., Any], lists: int, attributes: dict[str, Any]
) -> Callable[..., Any]:
    """`function` of `lists` lists, as a function of all their elements."""

    def run(*flat: np.ndarray) -> list[Any]:
        size = len(flat) // lists
        return [
            np.asarray(output)
            for output in function(
                *(flat[i * size : (i + 1) * size] for i in range(lists)),
                **attributes,
            )
        ]

    return run


def _call(
    function: Callable[..., Any],
    inputs: Sequence[tf.Tensor],
    dtypes: Sequence[tf.DType],
    shapes: Sequence[Sequence[int | None]],
) -> list[tf.Tensor]:
    def run(*arrays: np.ndarray) -> list[np.ndarray]:
        return [
            np.asarray(output, dtype.as_numpy_dtype)
            for output, dtype in zip(function(*arrays), dtypes, strict=True)
        ]

    outputs = tf.numpy_function(run, inputs, dtypes)
    for output, shape in zip(outputs, shapes, strict=True):
        output.set_shape(shape)
    return outputs
