"""`make_strategy`: the `tf.distribute` strategy for the hardware at hand."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

KINDS = ("auto", "tpu", "gpu", "cpu", "mirrored", "multi_worker")

REFUSED_PARAMETER_SERVER = (
    "ParameterServerStrategy is not supported; use MirroredStrategy, "
    "MultiWorkerMirroredStrategy or TPUStrategy (tde.make_strategy)."
)


def make_strategy(
    kind: str = "auto",
    *,
    tpu: Any = "local",
    devices: Sequence[str] | None = None,
    cluster_spec: Any = None,
    task: Any = None,
) -> tf.distribute.Strategy:
    """The `tf.distribute` strategy for the hardware at hand.

    It prints one line that says what it chose and why. Make the layer, the
    model and its optimizer inside `with strategy.scope():`.

    Args:
        kind: One of
            * `"auto"`: several workers if `TF_CONFIG` names them, else a TPU,
              else GPUs, else the CPU, whichever is there first;
            * `"tpu"`: a `TPUStrategy` over all cores of a TPU;
            * `"gpu"`: `MirroredStrategy` over the GPUs, or TensorFlow's
              default strategy for one;
            * `"cpu"`: TensorFlow's default strategy;
            * `"mirrored"`: `MirroredStrategy` over `devices`, or over all
              GPUs;
            * `"multi_worker"`: `MultiWorkerMirroredStrategy`. Make it first
              in the program, in each of its processes.
        tpu: For `"tpu"` the name or address of the TPU, as
            `TPUClusterResolver` takes it, or such a resolver.
        devices: For `"mirrored"`, `"gpu"` and `"cpu"`: names such as
            `["GPU:0", "GPU:1"]`.
        cluster_spec: For `"multi_worker"` `{"worker": ["host:port", ...]}`, or
            None to read `TF_CONFIG`.
        task: With `cluster_spec`, this process's `("worker", index)` or its
            index.

    Returns:
        The strategy.

    Raises:
        TypeError: an argument of a wrong type.
        ValueError: an unknown kind, or arguments of another kind.
        RuntimeError: the hardware asked for is not there, or the call comes
            too late or in a strategy's scope.

    Example:

    ```python
    import tf_distembed as tde

    strategy = tde.make_strategy("cpu")
    with strategy.scope():
        table = tde.TableConfig("movie", 100, 4)
        layer = tde.DistributedEmbedding(tde.FeatureConfig("movie", table))
    ```
    """
    if not isinstance(kind, str):
        raise TypeError(f"kind must be a str. Received: kind={kind!r}")
    if kind.startswith("parameter_server"):
        raise ValueError(REFUSED_PARAMETER_SERVER)
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}. Received: {kind!r}")
    if tf.distribute.has_strategy():
        raise RuntimeError(
            "make_strategy was called inside the scope of a "
            f"{type(tf.distribute.get_strategy()).__name__}. Make one strategy "
            "and call it outside."
        )
    _check_arguments(kind, devices, cluster_spec, task)
    if kind == "auto":
        return _automatic(tpu)
    if kind == "tpu":
        return _tpu_strategy(tpu)
    if kind == "multi_worker":
        return _multi_worker_strategy(cluster_spec, task)
    if kind == "cpu":
        if devices is None:
            return _say(_default(), "asked for")
        return _mirrored(list(devices), "asked for")
    if devices is None:
        found = len(tf.config.list_logical_devices("GPU"))
        if not found:
            raise RuntimeError(
                f"make_strategy(kind='{kind}') found no GPU. Name the devices, "
                "such as devices=['CPU:0', 'CPU:1'], or use kind='cpu'."
            )
        devices = [f"GPU:{i}" for i in range(found)]
        if kind == "gpu" and found == 1:
            return _say(_default(), "there is one GPU")
    return _mirrored(list(devices), "asked for")


def _say(strategy: tf.distribute.Strategy, why: str) -> tf.distribute.Strategy:
    name = type(strategy).__name__.lstrip("_")
    if name.startswith("DefaultDistributionStrategy"):
        name = "TensorFlow's default strategy"
    replicas = strategy.num_replicas_in_sync
    print(f"tf_distembed: {name}, {replicas} replica(s): {why}.")
    return strategy


def _default() -> tf.distribute.Strategy:
    # Outside of any scope this is TensorFlow's default strategy.
    return tf.distribute.get_strategy()


def _mirrored(devices: list[str], why: str) -> tf.distribute.Strategy:
    present = {
        f"{device.device_type}:{device.name.rsplit(':', 1)[1]}"
        for device in tf.config.list_logical_devices()
    }
    wanted = [device.strip("/").removeprefix("device:") for device in devices]
    missing = [device for device in wanted if device.upper() not in present]
    if missing:
        raise RuntimeError(
            f"make_strategy: there is no device {missing}. TensorFlow sees "
            f"{sorted(present)}. Logical CPUs are made with "
            "tf.config.set_logical_device_configuration, before TensorFlow "
            "starts."
        )
    return _say(tf.distribute.MirroredStrategy(devices), why)


def _tpu_strategy(tpu: Any, why: str = "asked for") -> tf.distribute.Strategy:
    resolver_class = tf.distribute.cluster_resolver.TPUClusterResolver
    try:
        resolver = (
            tpu if isinstance(tpu, resolver_class) else resolver_class(tpu=tpu)
        )
        if tpu != "local":
            tf.config.experimental_connect_to_cluster(resolver)
        topology = tf.tpu.experimental.initialize_tpu_system(resolver)
    except (tf.errors.OpError, ValueError, OSError) as error:
        raise RuntimeError(
            f"make_strategy(kind='tpu', tpu={tpu!r}) found no TPU that works: "
            f"{_first_line(error)} On the TPU's own machine install "
            "tf_distembed[tpu]; elsewhere give the TPU's name or address as "
            "tpu=. Without a TPU, tde.testing.sparsecore_emulator stands in."
        ) from error
    cores = topology.num_tasks * topology.num_tpus_per_task
    assignment = tf.tpu.experimental.DeviceAssignment.build(
        topology, num_replicas=cores
    )
    strategy = tf.distribute.TPUStrategy(
        resolver, experimental_device_assignment=assignment
    )
    return _say(strategy, why)


def _multi_worker_strategy(
    cluster_spec: Any, task: Any, why: str = "asked for"
) -> tf.distribute.Strategy:
    resolvers = tf.distribute.cluster_resolver
    if cluster_spec is None:
        if not _workers_of_environment():
            raise RuntimeError(
                "make_strategy(kind='multi_worker') needs cluster_spec= and "
                "task=, or the environment variable TF_CONFIG with a cluster "
                "of workers and this process's task."
            )
        resolver = resolvers.TFConfigClusterResolver()
    else:
        kind, index = ("worker", task) if isinstance(task, int) else task
        resolver = resolvers.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster_spec),
            task_type=kind,
            task_id=index,
            rpc_layer="grpc",
        )
    try:
        strategy = tf.distribute.MultiWorkerMirroredStrategy(
            cluster_resolver=resolver
        )
    except RuntimeError as error:
        raise RuntimeError(
            "make_strategy(kind='multi_worker') comes too late: TensorFlow has "
            "started. Call it first in the program, before any tensor, "
            f"variable or layer is made. ({_first_line(error)})"
        ) from error
    return _say(strategy, why)


def _automatic(tpu: Any) -> tf.distribute.Strategy:
    workers = _workers_of_environment()
    if len(workers) > 1:
        return _multi_worker_strategy(
            None, None, f"TF_CONFIG names {len(workers)} workers"
        )
    no_tpu = "there is no TPU"
    named = tpu != "local"
    systems = [
        device
        for kind in ("TPU", "TPU_SYSTEM")
        for device in tf.config.list_physical_devices(kind)
    ]
    if named or systems:
        try:
            return _tpu_strategy(
                tpu, f"tpu={tpu!r} was given" if named else "there is a TPU"
            )
        except RuntimeError as error:
            if named:
                raise
            no_tpu = f"the TPU does not work ({_first_line(error.__cause__)})"
    gpus = len(tf.config.list_logical_devices("GPU"))
    if gpus > 1:
        return _mirrored(
            [f"GPU:{i}" for i in range(gpus)], f"{no_tpu}, but {gpus} GPUs"
        )
    if gpus == 1:
        return _say(_default(), f"{no_tpu}, but one GPU")
    return _say(_default(), f"{no_tpu} and no GPU, so the CPU")


def _workers_of_environment() -> list[str]:
    """Addresses of the workers in TF_CONFIG; none without it."""
    text = os.environ.get("TF_CONFIG")
    if not text:
        return []
    try:
        cluster = json.loads(text).get("cluster", {})
    except (ValueError, AttributeError) as error:
        raise ValueError(f"TF_CONFIG is no JSON object: {text!r}") from error
    if "ps" in cluster:
        raise ValueError(REFUSED_PARAMETER_SERVER)
    return [
        address
        for kind in ("chief", "worker")
        for address in cluster.get(kind, [])
    ]


def _check_arguments(
    kind: str, devices: Any, cluster_spec: Any, task: Any
) -> None:
    if devices is not None:
        if isinstance(devices, str) or not (
            isinstance(devices, Sequence)
            and devices
            and all(isinstance(device, str) for device in devices)
        ):
            raise TypeError(
                "devices must be a list of names, such as ['GPU:0', 'GPU:1']. "
                f"Received: {devices!r}"
            )
        if kind not in ("mirrored", "gpu", "cpu"):
            raise ValueError(
                "devices is for kind 'mirrored', 'gpu' or 'cpu'. Received: "
                f"kind={kind!r}, devices={devices!r}"
            )
    if cluster_spec is None and task is None:
        return
    if kind != "multi_worker":
        raise ValueError(
            "cluster_spec and task are for kind 'multi_worker'. Received: "
            f"kind={kind!r}"
        )
    if cluster_spec is None or task is None:
        raise ValueError(
            "cluster_spec and task come together. Received: cluster_spec="
            f"{cluster_spec!r}, task={task!r}"
        )
    if not isinstance(cluster_spec, (Mapping, tf.train.ClusterSpec)):
        raise TypeError(
            "cluster_spec must be {'worker': ['host:port', ...]} or a "
            f"tf.train.ClusterSpec. Received: {cluster_spec!r}"
        )
    jobs = tf.train.ClusterSpec(cluster_spec).jobs
    if "ps" in jobs:
        raise ValueError(REFUSED_PARAMETER_SERVER)
    is_pair = (
        isinstance(task, (tuple, list))
        and len(task) == 2
        and isinstance(task[0], str)
        and isinstance(task[1], int)
    )
    if not is_pair and (isinstance(task, bool) or not isinstance(task, int)):
        raise TypeError(
            "task must be ('worker', index) or an index. Received: "
            f"task={task!r}"
        )


def _first_line(error: BaseException | None) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]
