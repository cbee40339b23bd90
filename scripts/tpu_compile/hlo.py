"""What stands in a lowered program, an HLO module in TensorFlow's protos."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from tensorflow.compiler.xla.service import hlo_pb2

LOOKUP = "SparseDenseMatmulWithMinibatchingOp"
UPDATE = "SparseDenseMatmulGradOptimizerUpdateWithMinibatchingOp"

# What waits for the host in the middle of a program.
_HOST_EXCHANGES = frozenset(
    {"infeed", "outfeed", "send", "send-done", "recv", "recv-done"}
)
# Where an update has its tables, and the numbers of its optimizer.
_TABLES, _NUMBERS = 5, 7


@dataclasses.dataclass(frozen=True)
class Update:
    """One call that updates a stack.

    Attributes:
        optimizer: The optimizer's name, as `"adam"`.
        shapes: Of the stack's rows on a chip, and of each slot.
        computes_rate: Whether the learning rate follows from what the program
            is given; if not, it is a constant.
        computation_id: The optimizer's computation.
    """

    optimizer: str
    shapes: tuple[tuple[int, ...], ...]
    computes_rate: bool
    computation_id: int


def updates(module: Any) -> list[Update]:
    """The calls that update stacks, in their order."""
    names = {c.id: c.name for c in module.computations}
    found = []
    for computation in module.computations:
        by_id = {i.id: i for i in computation.instructions}
        for instruction in computation.instructions:
            if instruction.custom_call_target != UPDATE:
                continue
            (called,) = instruction.called_computation_ids
            tables, numbers = (
                by_id[instruction.operand_ids[place]]
                for place in (_TABLES, _NUMBERS)
            )
            found.append(
                Update(
                    re.sub(r"_optimizer_builder.*", "", names[called]),
                    tuple(
                        tuple(shape.dimensions)
                        for shape in tables.shape.tuple_shapes
                    ),
                    _follows_from_parameter(numbers, by_id),
                    called,
                )
            )
    return found


def _follows_from_parameter(instruction: Any, by_id: dict[int, Any]) -> bool:
    seen, stack = set(), [instruction]
    while stack:
        one = stack.pop()
        if one.opcode == "parameter":
            return True
        if one.id not in seen:
            seen.add(one.id)
            stack += [by_id[i] for i in one.operand_ids]
    return False


def custom_calls(module: Any) -> list[str]:
    """The targets of all custom calls, in their order."""
    return [
        instruction.custom_call_target
        for computation in module.computations
        for instruction in computation.instructions
        if instruction.opcode == "custom-call"
    ]


def host_exchanges(module: Any) -> list[str]:
    """What a program would exchange with its host while it runs.

    Custom calls are among them, unless they are the SparseCore's own.
    """
    return [
        f"{instruction.opcode} {instruction.custom_call_target}".strip()
        for computation in module.computations
        for instruction in computation.instructions
        if instruction.opcode in _HOST_EXCHANGES
        or (
            instruction.opcode == "custom-call"
            and instruction.custom_call_target not in (LOOKUP, UPDATE)
        )
    ]


def standalone(module: Any, computation_id: int) -> Any:
    """A module of one computation of another, and of what that calls."""
    by_id = {c.id: c for c in module.computations}
    entry = by_id[computation_id]
    needed: dict[int, Any] = {}

    def need(computation: Any) -> None:
        # XLA wants what is called to stand before what calls it.
        for instruction in computation.instructions:
            for called in instruction.called_computation_ids:
                if called not in needed:
                    need(by_id[called])
        needed[computation.id] = computation

    need(entry)
    return hlo_pb2.HloModuleProto(
        name=entry.name,
        entry_computation_name=entry.name,
        entry_computation_id=entry.id,
        computations=needed.values(),
        host_program_shape=entry.program_shape,
    )
