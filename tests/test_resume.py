"""A killed run goes on, and ends where an uninterrupted one ends."""

from __future__ import annotations

import functools
import re
import subprocess
import sys
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
@pytest.mark.parametrize("batches", [5, 13])
def test_an_interrupted_run_goes_on(tmp_path: Path, batches: int) -> None:
    """At the end of the first epoch; in the third."""
    strategy = tf.distribute.get_strategy()
    expected = uninterrupted()
    interrupted(strategy, tmp_path, batches)
    interrupted(strategy, tmp_path, 3)
    got = resumed_run.train(strategy, str(tmp_path))
    setup.assert_close(got, expected)
    # Finished: there is nothing left to do.
    again = resumed_run.train(strategy, str(tmp_path))
    setup.assert_close(again, expected)


@pytest.mark.slow
def test_rates_that_were_reassigned_are_in_the_backup(tmp_path: Path) -> None:
    """In the middle of an epoch, the epoch's change is not made once more."""

    def run(directory: Path | None, *callbacks: Any) -> dict[str, Any]:
        halve = tde.TableLearningRateScheduler(lambda epoch, rate: rate / 2)
        return resumed_run.train(
            tf.distribute.get_strategy(),
            directory and str(directory),
            callbacks=[halve, *callbacks],
        )

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, Interrupt(8))
    setup.assert_close(run(tmp_path), run(None))


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
@pytest.mark.parametrize("strategy", ["default", "emulator1x4"])
def test_killed_at_any_moment(tmp_path: Path, strategy: str) -> None:
    """20 kills at random times; bit-equal in the end."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.resumed_run",
            strategy,
            str(tmp_path),
            str(KILLS),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    # The kills came when there were backups: in the middle of the training.
    assert len(set(re.findall(r"backup-\d+", done.stdout))) > 3, done.stdout
    whole, killed = tmp_path / "whole.npz", tmp_path / "killed.npz"
    with np.load(whole) as expected, np.load(killed) as got:
        assert set(expected) == set(got)
        for name in expected:
            np.testing.assert_array_equal(got[name], expected[name], name)
