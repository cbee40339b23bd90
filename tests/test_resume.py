"""A killed run goes on, and ends where an uninterrupted one ends."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde
from tests import resumed_run
from tests import training_setup as setup

ROOT = Path(__file__).resolve().parents[1]
KILLS = 20


class Interrupt(keras.callbacks.Callback):
    """Raises after some batches, as an interrupted process would end."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.left = batches

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt


def interrupted(strategy: Any, directory: Path, batches: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        resumed_run.train(
            strategy, str(directory), callbacks=[Interrupt(batches)]
        )


@functools.cache
def uninterrupted() -> dict[str, Any]:
    return resumed_run.train(tf.distribute.get_strategy(), None)


@pytest.mark.slow
@pytest.mark.parametrize("batches", [4, 5, 8, 13])
def test_an_interrupted_run_goes_on(tmp_path: Path, batches: int) -> None:
    """In the first epoch, at its end, in the second, in the third."""
    strategy = tf.distribute.get_strategy()
    expected = uninterrupted()
    interrupted(strategy, tmp_path, batches)
    interrupted(strategy, tmp_path, 3)
    got = resumed_run.train(strategy, str(tmp_path))
    setup.assert_close(got, expected)
    # Finished: there is nothing left to do.
    again = resumed_run.train(strategy, str(tmp_path))
    setup.assert_close(again, expected)


def test_two_backups_are_kept_and_a_broken_one_is_not_taken(
    tmp_path: Path,
) -> None:
    strategy = tf.distribute.get_strategy()
    interrupted(strategy, tmp_path, 9)
    names = {p.name.split(".")[0] for p in tmp_path.glob("backup-*")}
    assert names == {"backup-5", "backup-7"}
    # What a process leaves that is killed while it writes the next one.
    (tmp_path / "backup-9.data-00000-of-00001.tempstate123").write_bytes(b"x")
    (tmp_path / "backup-9.data-00000-of-00001").write_bytes(b"cut off")
    (tmp_path / "backup-9.index").write_bytes(b"cut off")
    got = resumed_run.train(strategy, str(tmp_path))
    setup.assert_close(got, uninterrupted())


def test_a_backup_of_another_model(tmp_path: Path) -> None:
    strategy = tf.distribute.get_strategy()
    interrupted(strategy, tmp_path, 4)
    keras.utils.set_random_seed(3)
    other = setup.model(8)
    with pytest.raises(ValueError, match="that of another model or optimizer"):
        tde.fit(other, resumed_run.data(), backup_dir=tmp_path, verbose=0)


@pytest.mark.slow
def test_two_replicas_go_on(tmp_path: Path, mirrored: Any) -> None:
    expected = resumed_run.train(mirrored, None)
    interrupted(mirrored, tmp_path, 8)
    setup.assert_close(resumed_run.train(mirrored, str(tmp_path)), expected)


@pytest.mark.slow
def test_the_emulator_goes_on(tmp_path: Path) -> None:
    with tde.testing.sparsecore_emulator(2) as strategy:
        expected = resumed_run.train(strategy, None)
        interrupted(strategy, tmp_path, 8)
        got = resumed_run.train(strategy, str(tmp_path))
    setup.assert_close(got, expected)


def start(strategy: str, backup_dir: Path | str, result: Path) -> Any:
    return subprocess.Popen(
        [
            sys.executable,
            "-m",
            "tests.resumed_run",
            strategy,
            str(backup_dir),
            str(result),
        ],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["default", "emulator"])
def test_killed_at_any_moment(tmp_path: Path, strategy: str) -> None:
    """20 kills at random times; bit-equal in the end."""
    whole = tmp_path / "whole.npz"
    began = time.monotonic()
    process = start(strategy, "", whole)
    _, said = process.communicate()
    assert process.returncode == 0, said
    lasts = time.monotonic() - began
    draw = random.Random(20240229)
    result, backups = tmp_path / "result.npz", tmp_path / "backups"
    kills = 0
    while not (kills >= KILLS and result.exists()):
        if result.exists():
            # It was quicker than the next kill: begin once more.
            for file in backups.glob("*"):
                file.unlink()
            result.unlink()
        process = start(strategy, backups, result)
        if kills < KILLS:
            try:
                process.communicate(timeout=draw.uniform(0.3, 1.0) * lasts)
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
                process.communicate()
                kills += 1
                continue
        else:
            _, said = process.communicate()
        assert process.returncode == 0, said
    with np.load(whole) as expected, np.load(result) as got:
        assert set(expected) == set(got)
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name], name)
