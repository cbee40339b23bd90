"""Entering and leaving `sparsecore_emulator`."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

import pytest
import tensorflow as tf

import tf_distembed as tde
from tf_distembed.testing import private_tensorflow


def replaced() -> list:
    return [getattr(owner, name) for owner, name, _ in private_tensorflow.HOOKS]


def test_gives_a_tpu_strategy() -> None:
    with tde.testing.sparsecore_emulator(4, 2) as strategy:
        assert isinstance(strategy, tf.distribute.TPUStrategy)
        assert strategy.num_replicas_in_sync == 4
        hardware = strategy.extended.tpu_hardware_feature
        kind = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
        assert hardware.embedding_feature == kind.V2
        assert hardware.num_embedding_devices_per_chip == 2


def test_tensorflow_is_as_it_was_after_the_block() -> None:
    before = replaced()
    with tde.testing.sparsecore_emulator():
        assert replaced() != before
    assert replaced() == before


def test_tensorflow_is_as_it_was_after_an_exception() -> None:
    before = replaced()
    with (
        pytest.raises(ZeroDivisionError),
        tde.testing.sparsecore_emulator() as strategy,
    ):
        raise ZeroDivisionError
    assert replaced() == before
    assert not tde.testing.emulator_active(strategy)
    with tde.testing.sparsecore_emulator():
        pass


def test_one_inside_another_is_refused() -> None:
    with tde.testing.sparsecore_emulator() as outer:
        before = replaced()
        with (
            pytest.raises(RuntimeError, match="leave that one first"),
            tde.testing.sparsecore_emulator(),
        ):
            pass
        assert replaced() == before
        assert tde.testing.emulator_active(outer)


def test_emulator_active_asks_the_current_strategy() -> None:
    assert not tde.testing.emulator_active()
    with tde.testing.sparsecore_emulator() as strategy:
        assert not tde.testing.emulator_active()
        with strategy.scope():
            assert tde.testing.emulator_active()
    with strategy.scope():
        assert not tde.testing.emulator_active()


def test_run_is_refused_after_the_block() -> None:
    with tde.testing.sparsecore_emulator() as strategy:
        function = tf.function(lambda: strategy.run(lambda: tf.constant(1)))
        assert int(function()) == 1
    with pytest.raises(RuntimeError, match="`with` block has ended"):
        strategy.run(tf.function(lambda: tf.constant(1)))
    # It was traced inside, so TensorFlow runs it without asking the strategy.
    with pytest.raises(tf.errors.OpError, match="`with` block has ended"):
        function()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, 4), "num_chips must be an int of at least 1. Received: .*=0"),
        ((True, 4), "num_chips must be an int"),
        ((2.0, 4), "num_chips must be an int"),
        ((1, 0), "sparsecores_per_chip must be an int of at least 1"),
        ((1, 8), "at most 4 SparseCores a chip. Received: .*=8"),
    ],
)
def test_counts_are_checked(arguments: tuple, message: str) -> None:
    with (
        pytest.raises(ValueError, match=message),
        tde.testing.sparsecore_emulator(*arguments),
    ):
        pass


def test_too_few_logical_cpus_say_what_to_put_first() -> None:
    with (
        pytest.raises(RuntimeError) as caught,
        tde.testing.sparsecore_emulator(64),
    ):
        pass
    message = str(caught.value)
    assert "needs 64 logical CPUs, and TensorFlow has started with 4" in message
    assert message.endswith(
        "    import tf_distembed as tde\n    tde.testing.prepare(64)"
    )


def test_a_tensorflow_without_what_is_replaced_is_refused(monkeypatch) -> None:
    hook = (
        private_tensorflow.tpu_embedding_v3,
        "no_such_ops",
        "tpu_embedding_v3.no_such_ops",
    )
    monkeypatch.setattr(
        private_tensorflow, "HOOKS", (*private_tensorflow.HOOKS, hook)
    )
    with (
        pytest.raises(
            RuntimeError, match="lacks: tpu_embedding_v3.no_such_ops"
        ),
        tde.testing.sparsecore_emulator(),
    ):
        pass


def test_a_tensorflow_without_a_module_is_refused(monkeypatch) -> None:
    for name in ("strategy", "private_tensorflow"):
        monkeypatch.delitem(sys.modules, f"tf_distembed.testing.{name}")
    monkeypatch.setitem(sys.modules, "tensorflow.python.tpu.ops", None)
    monkeypatch.delitem(sys.modules, "tensorflow.python.tpu.ops.gen_xla_ops")
    with (
        pytest.raises(RuntimeError, match=r"lacks: .*tensorflow\.python\.tpu"),
        tde.testing.sparsecore_emulator(),
    ):
        pass


SCRIPT = """
import tensorflow as tf
import tf_distembed as tde
with tde.testing.sparsecore_emulator(2) as strategy:
    print(len(tf.config.list_logical_devices("CPU")))
tde.testing.prepare(1)
tde.testing.prepare(2)
try:
    tde.testing.prepare(3)
except RuntimeError as error:
    print(error)
"""


def test_entering_first_makes_the_logical_cpus() -> None:
    """In a process of its own: TensorFlow must not have started."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
    )
    first, second, *_ = done.stdout.splitlines()
    assert first == "2"
    assert second.startswith("An emulator of 3 chips needs 3 logical CPUs")


CONFTEST = 'pytest_plugins = ["tf_distembed.testing.pytest_plugin"]'
TESTS = """
import pytest
import tensorflow as tf
import tf_distembed as tde

def test_first(sparsecore_emulator):
    strategy = sparsecore_emulator(3, 2)
    assert strategy.num_replicas_in_sync == 3
    assert len(tf.config.list_logical_devices("CPU")) == 3

def test_second(sparsecore_emulator):
    assert tde.testing.emulator_active(sparsecore_emulator())
"""


def test_pytest_plugin_gives_an_emulator_for_one_test(tmp_path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_mine.py").write_text(TESTS)
    settings = "sparsecore_emulator_chips=3"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-o", settings, str(tmp_path)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "PYTHONPATH": str(pathlib.Path(tde.__file__).parents[1]),
        },
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr
