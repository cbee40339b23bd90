"""Initial values: by blocks, equal everywhere, seeded, without a copy."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tf_distembed import initial_values
from tf_distembed.initial_values import InitialValues

I = keras.initializers  # noqa: E741

ROW_WISE = [
    "uniform",
    "normal",
    "truncated_normal",
    "zeros",
    "ones",
    I.Constant(3.0),
    I.Constant([1.0, 2.0, 3.0]),
    I.VarianceScaling(mode="fan_out"),
    None,
]
DRAWN_WHOLE = [
    "glorot_uniform",
    "he_normal",
    "orthogonal",
    I.VarianceScaling(mode="fan_in"),
    I.Constant(np.arange(21.0).reshape(7, 3)),
]


def name_of(initializer: object) -> str:
    """A name that is the same in every process."""
    if isinstance(initializer, I.Initializer):
        return type(initializer).__name__
    return str(initializer)


def values_of(initializer: Any, rows: int = 7, dtype: str = "float32") -> Any:
    blocks = InitialValues(initializer, (rows, 3), dtype, "Table 't'").blocks()
    return np.concatenate([values for _, values in blocks])


def table_values(**tables: Any) -> dict[str, np.ndarray]:
    """The values of a layer with a table of each initializer."""
    layer = tde.DistributedEmbedding(
        [
            tde.FeatureConfig(name, tde.TableConfig(name, 7, 3, initializer))
            for name, initializer in tables.items()
        ]
    )
    return {k: v.numpy() for k, v in layer.get_embedding_tables().items()}


def test_a_table_is_made_in_blocks_of_65536_rows():
    values = InitialValues("uniform", (140_000, 2), "float32", "Table 't'")
    found = [(start, part.shape) for start, part in values.blocks()]
    assert found == [
        (0, (65_536, 2)),
        (65_536, (65_536, 2)),
        (131_072, (8_928, 2)),
    ]


@pytest.mark.parametrize(
    "initializer", ["uniform", "normal", "truncated_normal", None]
)
def test_blocks_differ_and_do_not_depend_on_the_number_of_rows(initializer):
    law = (
        I.get(initializer) if initializer else I.VarianceScaling(mode="fan_out")
    )
    law = type(law).from_config({**law.get_config(), "seed": 5})
    short = InitialValues(law, (65_536, 2), "float32", "Table 't'")
    long = InitialValues(law, (131_072 + 9, 2), "float32", "Table 't'")
    parts = [part for _, part in long.blocks()]
    np.testing.assert_array_equal(next(short.blocks())[1], parts[0])
    assert not (parts[0] == parts[1]).any()
    assert not (parts[1][:9] == parts[2]).any()
    # Any one block can be drawn without the others.
    again = list(long.blocks())[1][1]
    np.testing.assert_array_equal(again, parts[1])


def test_the_default_has_a_standard_deviation_of_one_by_root_dim():
    values = InitialValues(None, (100_000, 16), "float32", "Table 't'")
    drawn = np.concatenate([part for _, part in values.blocks()])
    assert abs(drawn.std() * 4 - 1) < 0.01
    assert abs(drawn.mean()) < 0.01


@pytest.mark.parametrize("initializer", ROW_WISE, ids=name_of)
def test_laws_by_rows_are_drawn_whatever_the_size(initializer, monkeypatch):
    monkeypatch.setattr(initial_values, "MAX_WHOLE_BYTES", 1)
    monkeypatch.setattr(initial_values, "BLOCK_ROWS", 3)
    assert values_of(initializer).shape == (7, 3)


def test_constants():
    np.testing.assert_array_equal(
        values_of(I.Constant(3.0)), np.full([7, 3], 3)
    )
    np.testing.assert_array_equal(
        values_of(I.Constant([1.0, 2.0, 3.0])), [[1, 2, 3]] * 7
    )


@pytest.mark.parametrize("initializer", DRAWN_WHOLE, ids=name_of)
def test_other_laws_are_drawn_whole(initializer, monkeypatch):
    monkeypatch.setattr(initial_values, "BLOCK_ROWS", 3)
    law = I.get(initializer)
    config = law.get_config()
    if "seed" in config:
        law = type(law).from_config({**config, "seed": 11})
    np.testing.assert_array_equal(values_of(law), law((7, 3)))


@pytest.mark.parametrize("initializer", DRAWN_WHOLE, ids=name_of)
def test_other_laws_are_refused_above_a_size(initializer, monkeypatch):
    monkeypatch.setattr(initial_values, "MAX_WHOLE_BYTES", 7 * 3 * 4 - 1)
    config = tde.TableConfig("item", 7, 3, initializer)
    with pytest.raises(ValueError) as caught:
        tde.DistributedEmbedding(tde.FeatureConfig("f", config))
    for part in [
        "Table 'item'",
        "must be drawn whole",
        "depend on the number of rows",
        "VarianceScaling(mode='fan_out')",
        "set_embedding_tables",
    ]:
        assert part in str(caught.value)
    monkeypatch.setattr(initial_values, "MAX_WHOLE_BYTES", 7 * 3 * 4)
    tde.DistributedEmbedding(tde.FeatureConfig("f", config))


def test_a_callable_is_drawn_whole():
    calls = []

    def rising(shape: Any, dtype: Any = None) -> Any:
        calls.append((tuple(shape), dtype))
        return np.arange(21.0).reshape(shape)

    np.testing.assert_array_equal(
        table_values(item=rising)["item"], np.arange(21.0).reshape(7, 3)
    )
    assert calls == [((7, 3), "float32")]


def test_a_callable_of_another_shape_is_refused():
    config = tde.TableConfig("item", 7, 3, lambda shape, dtype: np.ones([3]))
    with pytest.raises(ValueError) as caught:
        tde.DistributedEmbedding(tde.FeatureConfig("f", config))
    for part in ["Table 'item'", "shape (7, 3)", "(3,)"]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "array",
    [
        np.arange(21.0).reshape(7, 3),
        np.arange(21).reshape(7, 3),
        tf.reshape(tf.range(21.0), [7, 3]),
        tf.Variable(np.arange(21.0, dtype="float32").reshape(7, 3)),
    ],
    ids=["float64", "int64", "tensor", "variable"],
)
def test_an_array_is_taken_block_by_block(array, monkeypatch):
    monkeypatch.setattr(initial_values, "BLOCK_ROWS", 2)
    found = table_values(item=array)["item"]
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.arange(21.0).reshape(7, 3))


def test_an_array_is_never_put_into_a_graph():
    array = np.random.default_rng(0).normal(size=[7, 3])
    config = tde.TableConfig("item", 7, 3, array)
    layer: list[Any] = []

    @tf.function
    def look_up(ids: tf.Tensor) -> tf.Tensor:
        if not layer:
            layer.append(
                tde.DistributedEmbedding(tde.FeatureConfig("f", config))
            )
        return layer[0](ids)

    np.testing.assert_allclose(look_up(tf.constant([2])), array[[2]], rtol=1e-6)
    graph = look_up.get_concrete_function(tf.constant([2])).graph.as_graph_def()
    constants = [
        tf.TensorShape(node.attr["value"].tensor.tensor_shape).num_elements()
        for function in [graph, *graph.library.function]
        for node in getattr(function, "node", None) or function.node_def
        if node.op == "Const"
    ]
    assert max(constants) < 21


# -- Seeds --------------------------------------


@pytest.mark.parametrize(
    "initializer", ["uniform", None, "orthogonal", I.RandomNormal], ids=str
)
def test_tables_start_different_and_reproducibly(initializer):
    drawn = []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        drawn.append(table_values(a=initializer, b=initializer))
    for name in ("a", "b"):
        np.testing.assert_array_equal(drawn[0][name], drawn[1][name])
    assert not (drawn[0]["a"] == drawn[0]["b"]).any()
    keras.utils.set_random_seed(4)
    other = table_values(a=initializer, b=initializer)
    assert not (other["a"] == drawn[0]["a"]).any()


def test_tables_of_one_initializer_object_start_different():
    shared = I.RandomUniform()
    values = table_values(a=shared, b=shared)
    assert not (values["a"] == values["b"]).any()
    # And so do two layers made from one configuration.
    table = tde.TableConfig("item", 7, 3, shared)
    one, other = (
        tde.DistributedEmbedding(tde.FeatureConfig("f", table))
        for _ in range(2)
    )
    tables = [layer.get_embedding_tables()["item"] for layer in (one, other)]
    assert not (tables[0].numpy() == tables[1].numpy()).any()


def test_an_explicit_seed_gives_the_same_values_every_time():
    first = table_values(item=I.RandomUniform(seed=7))["item"]
    keras.utils.set_random_seed(99)
    second = table_values(item=I.RandomUniform(seed=7))["item"]
    np.testing.assert_array_equal(first, second)
    other = table_values(item=I.RandomUniform(seed=8))["item"]
    assert not (first == other).any()


def test_a_seed_generator_gives_new_values_each_time_and_reproducibly():
    drawn = []
    for _ in range(2):
        law = I.RandomUniform(seed=keras.random.SeedGenerator(7))
        drawn.append(table_values(a=law, b=law))
    assert not (drawn[0]["a"] == drawn[0]["b"]).any()
    for name in ("a", "b"):
        np.testing.assert_array_equal(drawn[0][name], drawn[1][name])


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "initializer",
    ["uniform", None, np.ones([7, 3])],
    ids=["name", "-", "array"],
)
def test_values_have_the_dtype_of_the_table(dtype, initializer):
    layer = tde.DistributedEmbedding(
        tde.FeatureConfig("f", tde.TableConfig("item", 7, 3, initializer)),
        dtype=dtype,
    )
    assert layer.get_embedding_tables()["item"].dtype == dtype
    assert layer([1]).dtype == dtype


# -- Memory -------------------------------------

MEASURE = """
    import pathlib, re, resource
    import tf_distembed as tde

    def layer(rows, initializer):
        table = tde.TableConfig("t", rows, 64, initializer, optimizer="sgd")
        return tde.DistributedEmbedding(tde.FeatureConfig("f", table))

    def peak():
        # Linux counts into ru_maxrss (bytes on macOS) what the parent had.
        status = pathlib.Path("/proc/self/status")
        if status.exists():
            return int(re.search(r"VmHWM:\\s+(\\d+)", status.read_text())[1])
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    rows = 1_500_000
    layer(200_000, "uniform")  # what drawing a block needs is in the peak
    before = peak()
    kept = layer(rows, "uniform")
    print((peak() - before) * 1024 / (rows * 64 * 4))
"""


@pytest.mark.slow
def test_making_a_table_holds_no_second_copy_of_it():
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(MEASURE)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    # In units of the table, of 384 MB: itself, and what a block needs.
    assert 0.8 < float(done.stdout) < 1.5
