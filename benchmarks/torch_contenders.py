"""torch's EmbeddingBag and FBGEMM's table-batched embeddings, on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fbgemm_gpu  # noqa: F401  (registers its operations)
import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from benchmarks.contender import LEARNING_RATE, Contender
from benchmarks.workloads import Batch, Workload


class EmbeddingBags(Contender):
    """`torch.nn.EmbeddingBag(sparse=True)`, a `torch.optim` optimizer."""

    title = "torch EmbeddingBag"

    def __init__(self, workload: Workload, optimizer: str) -> None:
        super().__init__(workload)
        self._bags = [
            torch.nn.EmbeddingBag(
                rows,
                workload.dim,
                mode=workload.combiner,
                sparse=True,
                include_last_offset=True,
            )
            for rows in workload.tables
        ]
        weights = [bag.weight for bag in self._bags]
        if optimizer == "sgd":
            self._optimizer: Any = torch.optim.SGD(weights, LEARNING_RATE)
        elif optimizer == "adagrad":
            self._optimizer = torch.optim.Adagrad(
                weights,
                LEARNING_RATE,
                initial_accumulator_value=0.1,
                eps=1e-7,
            )
        elif optimizer == "adam":
            self._optimizer = torch.optim.SparseAdam(
                weights, LEARNING_RATE, eps=1e-7
            )
        else:
            raise ValueError(f"torch has no {optimizer}")

    def inputs_of(self, batch: Batch) -> Any:
        ids = [
            (torch.from_numpy(one.values), torch.from_numpy(one.splits))
            for one in batch.ids
        ]
        return ids, [torch.from_numpy(one) for one in batch.gradients]

    def _outputs(self, ids: Any) -> list[torch.Tensor]:
        return [
            self._bags[feature.table](*one)
            for feature, one in zip(self.workload.features, ids, strict=True)
        ]

    def forward(self, inputs: Any) -> Any:
        with torch.no_grad():
            return self._outputs(inputs[0])

    def train(self, inputs: Any) -> None:
        ids, gradients = inputs
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(self._outputs(ids), gradients)
        self._optimizer.step()

    def set_tables(self, values: Sequence[np.ndarray]) -> None:
        with torch.no_grad():
            for bag, value in zip(self._bags, values, strict=True):
                bag.weight.copy_(torch.from_numpy(value))

    def get_tables(self) -> list[np.ndarray]:
        return [bag.weight.detach().numpy().copy() for bag in self._bags]


class Fbgemm(Contender):
    """`SplitTableBatchedEmbeddingBagsCodegen`: all features in one call.

    On a CPU it has exact SGD and Adagrad, no Adam and no FTRL.
    """

    title = "FBGEMM TBE"

    def __init__(self, workload: Workload, optimizer: str) -> None:
        super().__init__(workload)
        kinds = {
            "sgd": EmbOptimType.EXACT_SGD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
        }
        pooling = {"mean": PoolingMode.MEAN, "sum": PoolingMode.SUM}
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [
                (rows, workload.dim, EmbeddingLocation.HOST, ComputeDevice.CPU)
                for rows in workload.tables
            ],
            feature_table_map=[f.table for f in self._ordered(workload)],
            optimizer=kinds[optimizer],
            learning_rate=LEARNING_RATE,
            eps=1e-7,
            pooling_mode=pooling[workload.combiner],
        )
        self._tables.init_embedding_weights_uniform(-0.05, 0.05)
        if optimizer == "adagrad":
            for (accumulator,) in self._tables.split_optimizer_states():
                accumulator.fill_(0.1)

    @staticmethod
    def _ordered(workload: Workload) -> list[Any]:
        """It wants the features of a table beside each other."""
        return sorted(workload.features, key=lambda feature: feature.table)

    def _order(self) -> list[int]:
        return [
            self.workload.features.index(feature)
            for feature in self._ordered(self.workload)
        ]

    def inputs_of(self, batch: Batch) -> Any:
        order = self._order()
        ids = np.concatenate([batch.ids[i].values for i in order])
        lengths = [np.diff(batch.ids[i].splits) for i in order]
        splits = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        gradient = batch.gradients[order].transpose(1, 0, 2)
        return (
            torch.from_numpy(ids),
            torch.from_numpy(splits.astype(np.int64)),
            torch.from_numpy(gradient.reshape(len(gradient), -1).copy()),
        )

    def forward(self, inputs: Any) -> Any:
        """`[B, F * D]`, with the features in its own order."""
        with torch.no_grad():
            return self._tables(*inputs[:2])

    def outputs_of(self, inputs: Any) -> np.ndarray:
        outputs = self.forward(inputs).numpy()
        parts = outputs.reshape(len(outputs), -1, self.workload.dim)
        return parts.transpose(1, 0, 2)[np.argsort(self._order())]

    def train(self, inputs: Any) -> None:
        self._tables(*inputs[:2]).backward(inputs[2])

    def set_tables(self, values: Sequence[np.ndarray]) -> None:
        for to, value in zip(
            self._tables.split_embedding_weights(), values, strict=True
        ):
            to.copy_(torch.from_numpy(value))

    def get_tables(self) -> list[np.ndarray]:
        return [
            one.detach().numpy().copy()
            for one in self._tables.split_embedding_weights()
        ]
