"""What scripts/tpu_compile reads in a program, on programs made by hand."""

from __future__ import annotations

import importlib
import pathlib
from types import ModuleType
from typing import Any

import pytest
from tensorflow.compiler.xla.service import hlo_pb2

FOLDER = pathlib.Path(__file__).parents[1] / "scripts/tpu_compile"


@pytest.fixture
def hlo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("hlo")


def instruction(number: int, opcode: str, *operands: int, **more: Any) -> Any:
    return hlo_pb2.HloInstructionProto(
        id=number, opcode=opcode, operand_ids=operands, **more
    )


def program(*instructions: Any, rate_from: str = "parameter") -> Any:
    """An update of a stack [64, 8] with one slot, and more instructions."""
    table = {"dimensions": [64, 8]}
    entry = [
        *(instruction(n, "parameter") for n in range(5)),
        instruction(5, "tuple", shape={"tuple_shapes": [table, table]}),
        instruction(6, "parameter"),
        instruction(7, rate_from),
        instruction(8, "multiply", 7, 7),
        instruction(9, "tuple", 8),
        instruction(
            10,
            "custom-call",
            *(0, 1, 2, 3, 4, 5, 6, 9),
            custom_call_target=(
                "SparseDenseMatmulGradOptimizerUpdateWithMinibatchingOp"
            ),
            called_computation_ids=[20],
        ),
        *instructions,
    ]
    # What the optimizer calls stands last, which no program of its own may.
    return hlo_pb2.HloModuleProto(
        name="program",
        computations=[
            {"id": 30, "name": "main", "instructions": entry},
            {
                "id": 20,
                "name": "adagrad_optimizer_builder.7",
                "instructions": [
                    instruction(21, "map", called_computation_ids=[40])
                ],
                "program_shape": {"parameter_names": ["gradient"]},
            },
            {"id": 40, "name": "square"},
        ],
    )


def test_an_update_is_found_with_its_optimizer_and_shapes(hlo):
    (update,) = hlo.updates(program())
    assert update.optimizer == "adagrad"
    assert update.shapes == ((64, 8), (64, 8))
    assert update.computation_id == 20


@pytest.mark.parametrize("opcode", ["parameter", "constant"])
def test_a_learning_rate_that_cannot_change_is_seen(hlo, opcode):
    (update,) = hlo.updates(program(rate_from=opcode))
    assert update.computes_rate == (opcode == "parameter")


def test_an_update_alone_exchanges_nothing_with_the_host(hlo):
    assert hlo.host_exchanges(program()) == []


@pytest.mark.parametrize(
    "more",
    [
        {"opcode": "outfeed"},
        {"opcode": "recv"},
        {"opcode": "custom-call", "custom_call_target": "a_host_callback"},
    ],
    ids=lambda more: more["opcode"],
)
def test_what_waits_for_the_host_is_seen(hlo, more):
    found = hlo.host_exchanges(program(instruction(11, **more)))
    assert found == [" ".join(more.values())]


def computation_ids(module: Any) -> list[int]:
    return [one.id for one in module.computations]


def test_a_computation_alone_brings_what_it_calls(hlo):
    alone = hlo.standalone(program(), 20)
    assert computation_ids(alone) == [40, 20]
    assert alone.entry_computation_id == 20
    assert alone.entry_computation_name == "adagrad_optimizer_builder.7"
    assert alone.host_program_shape.parameter_names == ["gradient"]
