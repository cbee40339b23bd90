"""Two processes on this machine train as one device does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import training_setup as setup

ROOT = Path(__file__).resolve().parents[1]
ROWS, GLOBAL = 19, 8

WORKER = """
import json, os, sys
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
import tf_distembed as tde
workers, index, result = sys.argv[1].split(","), int(sys.argv[2]), sys.argv[3]
cluster = {"worker": workers}
if index == 0:
    strategy = tde.make_strategy(
        "multi_worker", cluster_spec=cluster, task=index)
else:
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": cluster, "task": {"type": "worker", "index": index}})
    strategy = tde.make_strategy()
import numpy as np
from tests import data_autotuning, test_multi_worker
data_autotuning.turn_off()
left = test_multi_worker.train(strategy)
again = test_multi_worker.train(strategy, steps_per_call=2, kind="sparse")
left |= {f"two/{k}": v for k, v in again.items()}
np.savez(result, **{k.replace("/", "|"): v for k, v in left.items()})
"""


def train(
    strategy: tf.distribute.Strategy,
    steps_per_call: int = 1,
    kind: str = "ragged",
) -> dict:
    """Two epochs with a last batch of 3 rows: only one worker has rows."""
    import keras

    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = setup.model(GLOBAL)
    data = setup.dataset(ROWS, GLOBAL, kind, drop_remainder=False)
    history = tde.fit(
        model,
        data,
        epochs=2,
        validation_data=data,
        steps_per_call=steps_per_call,
        verbose=0,
    )
    predict = tde.make_predict_step(model)
    predicted = [
        predict(batch).numpy()
        for batch in tde.distribute_dataset(data, strategy)
    ]
    left = {f"history/{k}": v for k, v in history.history.items()}
    left["predicted"] = np.concatenate(predicted)
    return left | setup.model_state(model)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]


@pytest.mark.slow
def test_two_workers_give_what_one_device_gives(tmp_path: Path) -> None:
    """One is told the addresses, the other reads them in TF_CONFIG."""
    workers = ",".join(f"localhost:{free_port()}" for _ in range(2))
    environment = {k: v for k, v in os.environ.items() if k != "TF_CONFIG"}
    results = [tmp_path / f"{i}.npz" for i in range(2)]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, workers, str(i), str(result)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, result in enumerate(results)
    ]
    try:
        for process in processes:
            said, _ = process.communicate(timeout=500)
            assert process.returncode == 0, said[-3000:]
    finally:
        for process in processes:
            process.kill()
    expected = train(tf.distribute.get_strategy())
    found = []
    for result in results:
        with np.load(result) as arrays:
            found.append({k.replace("|", "/"): v for k, v in arrays.items()})
    expected |= {f"two/{k}": v for k, v in expected.items()}
    setup.assert_close(found[0], expected)
    for name, value in found[0].items():
        np.testing.assert_array_equal(found[1][name], value, name)
