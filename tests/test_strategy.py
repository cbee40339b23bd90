"""make_strategy: what it chooses, says and refuses."""

from __future__ import annotations

import json
import sys
import types
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import training_setup as setup


class Fakes:
    """Hardware that is not here; notes what is done with it.

    A TPU of two machines with four cores each, and GPUs.
    """

    def __init__(self, monkeypatch: Any, tpu: bool = False, gpus: int = 0):
        self.done: list[Any] = []
        self.tpu_fails = False
        monkeypatch.delenv("TF_CONFIG", raising=False)
        physical = tf.config.list_physical_devices
        logical = tf.config.list_logical_devices
        fake_gpus = [
            types.SimpleNamespace(device_type="GPU", name=f"/device:GPU:{i}")
            for i in range(gpus)
        ]

        def list_physical(kind: Any = None) -> list[Any]:
            return ["TPU"] if tpu and kind == "TPU" else physical(kind)

        def list_logical(kind: Any = None) -> list[Any]:
            if kind == "GPU":
                return fake_gpus
            return logical(kind) + ([] if kind else fake_gpus)

        fakes = self

        class TPUClusterResolver:
            def __init__(self, tpu: str) -> None:
                fakes.done.append(("resolve", tpu))

        class TPUStrategy:
            def __init__(
                self, resolver: Any, experimental_device_assignment: Any
            ) -> None:
                self.assignment = experimental_device_assignment
                self.num_replicas_in_sync = self.assignment.num_replicas

        class MirroredStrategy:
            def __init__(self, devices: list[str]) -> None:
                self.devices = devices
                self.num_replicas_in_sync = len(devices)

        for module, name, value in (
            (tf.config, "list_physical_devices", list_physical),
            (tf.config, "list_logical_devices", list_logical),
            (tf.config, "experimental_connect_to_cluster", self.connect),
            (
                tf.distribute.cluster_resolver,
                "TPUClusterResolver",
                TPUClusterResolver,
            ),
            (tf.tpu.experimental, "initialize_tpu_system", self.initialise),
            (tf.distribute, "TPUStrategy", TPUStrategy),
            (tf.distribute, "MirroredStrategy", MirroredStrategy),
        ):
            monkeypatch.setattr(module, name, value)

    def connect(self, resolver: Any) -> None:
        self.done.append("connect")

    def initialise(self, resolver: Any) -> Any:
        self.done.append("initialise")
        if self.tpu_fails:
            raise tf.errors.NotFoundError(None, None, "nobody answers\nmore")
        coordinates = [
            [[x, task, 0, core] for x in range(2) for core in range(2)]
            for task in range(2)
        ]
        return tf.tpu.experimental.Topology(
            mesh_shape=[2, 2, 1, 2], device_coordinates=np.array(coordinates)
        )


def test_a_tpu_is_used_with_all_of_its_cores(monkeypatch, capsys) -> None:
    fakes = Fakes(monkeypatch)
    strategy = tde.make_strategy("tpu", tpu="my-tpu")
    assert fakes.done == [("resolve", "my-tpu"), "connect", "initialise"]
    places = {
        (strategy.assignment.host_device(i), strategy.assignment.tpu_ordinal(i))
        for i in range(8)
    }
    assert len(places) == strategy.num_replicas_in_sync == 8
    assert "TPUStrategy, 8 replica(s): asked for" in capsys.readouterr().out
    # On the TPU's own machine there is nothing to connect to.
    fakes.done.clear()
    tde.make_strategy("tpu")
    assert fakes.done == [("resolve", "local"), "initialise"]


def test_auto_takes_a_tpu_then_gpus_then_the_cpu(monkeypatch, capsys) -> None:
    with monkeypatch.context() as patch:
        Fakes(patch, tpu=True, gpus=2)
        assert tde.make_strategy().num_replicas_in_sync == 8
        assert "there is a TPU" in capsys.readouterr().out
        # Named, so it need not be seen.
        tde.make_strategy(tpu="my-tpu")
        assert "tpu='my-tpu' was given" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        Fakes(patch, gpus=2)
        assert tde.make_strategy().devices == ["GPU:0", "GPU:1"]
        assert "there is no TPU, but 2 GPUs" in capsys.readouterr().out
        assert tde.make_strategy("gpu").devices == ["GPU:0", "GPU:1"]
        assert tde.make_strategy("mirrored").devices == ["GPU:0", "GPU:1"]
    with monkeypatch.context() as patch:
        Fakes(patch, gpus=1)
        assert tde.make_strategy() is tf.distribute.get_strategy()
        assert tde.make_strategy("gpu") is tf.distribute.get_strategy()
        assert "one GPU" in capsys.readouterr().out


def test_auto_says_that_a_tpu_does_not_work(monkeypatch, capsys) -> None:
    fakes = Fakes(monkeypatch, tpu=True)
    fakes.tpu_fails = True
    assert tde.make_strategy() is tf.distribute.get_strategy()
    said = capsys.readouterr().out
    assert "the TPU does not work (nobody answers) and no GPU" in said
    with pytest.raises(RuntimeError, match="'my-tpu'.*nobody answers"):
        tde.make_strategy(tpu="my-tpu")


def test_make_strategy_says_what_it_chose(capsys, monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    strategy = tde.make_strategy()
    assert strategy is tf.distribute.get_strategy()
    assert "no TPU and no GPU, so the CPU" in capsys.readouterr().out
    assert tde.make_strategy("cpu") is strategy
    data = setup.dataset(8, 4)
    assert tde.distribute_dataset(data, strategy) is data


def test_make_strategy_over_named_devices(capsys) -> None:
    # One device: a second strategy of several would share the collectives.
    strategy = tde.make_strategy("mirrored", devices=["CPU:3"])
    assert isinstance(strategy, tf.distribute.MirroredStrategy)
    assert strategy.num_replicas_in_sync == 1
    assert "MirroredStrategy, 1 replica" in capsys.readouterr().out
    with pytest.raises(RuntimeError, match=r"no device \['CPU:9'\].*CPU:0"):
        tde.make_strategy("mirrored", devices=["CPU:0", "CPU:9"])


def test_a_tpu_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match=r"found no TPU that works.*TPUs? "):
        tde.make_strategy("tpu")
    with pytest.raises(RuntimeError, match="found no TPU that works"):
        tde.make_strategy("tpu", tpu="")


@pytest.mark.parametrize("kind", ["gpu", "mirrored"])
def test_gpus_that_are_not_there(kind: str) -> None:
    if tf.config.list_logical_devices("GPU"):
        assert tde.make_strategy(kind).num_replicas_in_sync >= 1
        return
    with pytest.raises(RuntimeError, match="found no GPU.*devices="):
        tde.make_strategy(kind)


@pytest.mark.parametrize(
    "error,match,arguments",
    [
        (TypeError, "kind must be a str", {"kind": 3}),
        (ValueError, "one of .*'auto'", {"kind": "gpus"}),
        (ValueError, "ParameterServer", {"kind": "parameter_server"}),
        (ValueError, "devices is for", {"kind": "tpu", "devices": ["a"]}),
        (TypeError, "list of names", {"kind": "cpu", "devices": "CPU:0"}),
        (ValueError, "are for kind", {"kind": "cpu", "task": 0}),
        (ValueError, "come together", {"kind": "multi_worker", "task": 0}),
        (
            TypeError,
            "task must be",
            {
                "kind": "multi_worker",
                "cluster_spec": {"worker": ["localhost:1"]},
                "task": "worker",
            },
        ),
        (
            ValueError,
            "ParameterServer",
            {
                "kind": "multi_worker",
                "cluster_spec": {"worker": ["a:1"], "ps": ["b:1"]},
                "task": 0,
            },
        ),
    ],
)
def test_make_strategy_says_what_it_takes(error, match, arguments) -> None:
    with pytest.raises(error, match=match):
        tde.make_strategy(**arguments)


def test_multi_worker_needs_to_know_the_workers(monkeypatch) -> None:
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(RuntimeError, match="TF_CONFIG"):
        tde.make_strategy("multi_worker")
    monkeypatch.setenv("TF_CONFIG", "not json")
    with pytest.raises(ValueError, match="no JSON"):
        tde.make_strategy("auto")
    cluster = {"cluster": {"worker": ["a:1", "b:1"], "ps": ["c:1"]}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(cluster))
    with pytest.raises(ValueError, match="ParameterServerStrategy is not"):
        tde.make_strategy("auto")


def test_multi_worker_that_comes_too_late() -> None:
    tf.constant(1.0)
    with pytest.raises(RuntimeError, match=r"comes too late.*Call it first"):
        tde.make_strategy(
            "multi_worker",
            cluster_spec={"worker": ["localhost:1", "localhost:2"]},
            task=("worker", 1),
        )


def test_make_strategy_inside_a_scope(mirrored) -> None:
    with (
        mirrored.scope(),
        pytest.raises(RuntimeError, match="inside the scope"),
    ):
        tde.make_strategy("cpu")


def test_a_layer_refuses_parameter_servers(monkeypatch) -> None:
    # A real one would need running servers before it has a scope.
    kind = tf.distribute.ParameterServerStrategy
    strategy = object.__new__(kind)
    monkeypatch.setattr(tf.distribute, "get_strategy", lambda: strategy)
    with pytest.raises(ValueError, match="ParameterServerStrategy is not"):
        setup.layer()


def test_a_layer_refuses_what_keras_would_ignore(monkeypatch) -> None:
    """Keras' TensorFlow backend trains on one device, and does not say so."""
    # Keras 3.12 asks its backend for these, and TensorFlow's has them not.
    backend = sys.modules["keras.src.backend.tensorflow.distribution_lib"]
    for name, value in (("num_processes", 1), ("process_id", 0)):
        if not hasattr(backend, name):
            monkeypatch.setattr(
                backend, name, lambda value=value: value, raising=False
            )
    devices = ["cpu:0", "cpu:1"]
    try:
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=devices[:1])
        )
        setup.layer()
        keras.distribution.set_distribution(
            keras.distribution.DataParallel(devices=devices)
        )
        with pytest.raises(ValueError, match=r"over 2 devices.*make_strategy"):
            setup.layer()
    finally:
        keras.distribution.set_distribution(None)
