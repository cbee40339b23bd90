"""The main job: train on MovieLens-100K, save, load elsewhere, compare."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any

import keras
import numpy as np

from tf_distembed.datasets import (
    MovieLens,
    RatingFeatures,
    load_movielens_100k,
)
from tf_distembed.datasets._sources import replace_file
from tf_distembed.rating_model import build_rating_model, rating_features

MODEL_FILE = "model.keras"
RUN_FILE = "run.json"

# Ratings are stars from 1 to 5, and so is every prediction that is compared.
LOWEST, HIGHEST = 1.0, 5.0


class RunError(Exception):
    """A run that cannot go on, for a reason the user can mend."""


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the result of a run; is written beside the model."""

    data_dir: str | None
    cache_dir: str | None
    epochs: int
    steps_per_epoch: int | None
    batch_size: int
    embedding_dim: int
    history_size: int
    test_fraction: float
    seed: int


def train(settings: Settings, output_dir: str) -> dict[str, Any]:
    """Trains a model, saves it, and has a new process evaluate it again.

    Writes `model.keras` and `run.json` into `output_dir`, each replaced as a
    whole; everything else it prints.

    Returns:
        `test_rmse` of the model in this process, `baseline_rmse` of the item
        mean on the same ratings, and `reload_max_abs_diff`, the largest
        difference between the predictions of the two processes.

    Raises:
        DataNotFoundError: The data is nowhere to be had.
        OSError: `output_dir` cannot be written.
        RunError: The data is too small to split, or the second process
            failed; holds what it said.
    """
    # Before the work, so that a folder that cannot be made costs none.
    Path(output_dir).mkdir(parents=True, exist_ok=True)
    keras.utils.set_random_seed(settings.seed)
    data, features, train_rows, test_rows = _load(settings)
    print(
        f"{len(train_rows):,} ratings to train on, {len(test_rows):,} to test "
        f"on, of {data.num_items:,} items by {data.num_users:,} users"
    )
    model = build_rating_model(
        rating_features(data, settings.embedding_dim, settings.history_size),
        features.mean_rating,
    )
    batches = features.dataset(
        train_rows, settings.batch_size, shuffle_seed=settings.seed
    )
    if settings.steps_per_epoch is not None:
        batches = batches.take(settings.steps_per_epoch)
    model.fit(
        batches,
        epochs=settings.epochs,
        shuffle=False,  # The batches are shuffled already.
        # A bar that redraws itself is noise in a file.
        verbose=1 if sys.stdout.isatty() else 2,
    )
    predicted = _predict(model, features, test_rows, settings.batch_size)
    ratings = data.rating[test_rows]
    test_rmse = _rmse(predicted, ratings)
    baseline_rmse = _baseline_rmse(data, features, test_rows)
    print(
        f"Test RMSE {test_rmse:.4f}; the mean rating of each item gives "
        f"{baseline_rmse:.4f}"
    )
    path = _save(model, settings, data, Path(output_dir))
    print(f"Saved {path}; loading it in a new process", flush=True)
    again = _predict_in_new_process(path)
    difference = float(np.max(np.abs(again - predicted)))
    print(
        f"Test RMSE there {_rmse(again, ratings):.4f}; largest difference of "
        f"a prediction {difference:.1e}"
    )
    return {
        "test_rmse": test_rmse,
        "baseline_rmse": baseline_rmse,
        "reload_max_abs_diff": difference,
    }


def evaluate(
    model_path: str,
    *,
    data_dir: str | None = None,
    cache_dir: str | None = None,
    predictions_path: str | None = None,
) -> dict[str, Any]:
    """Evaluates a saved model on the test part of the run that made it.

    Args:
        model_path: The `.keras` file; `run.json` stands beside it.
        data_dir: Where the data is now; `None`: where the run found it.
        cache_dir: Likewise for the cache.
        predictions_path: A `.npy` file to write, float32 `[test ratings]`.

    Returns:
        `test_rmse` and `baseline_rmse`.

    Raises:
        DataNotFoundError: The data is nowhere to be had.
        OSError: The model or its `run.json` cannot be read.
        RunError: The data is not what the model was trained on, or
            `run.json` is damaged.
    """
    path = Path(model_path)
    settings, fingerprint = _read_run(path.parent / RUN_FILE)
    settings = dataclasses.replace(
        settings,
        data_dir=data_dir or settings.data_dir,
        cache_dir=cache_dir or settings.cache_dir,
    )
    data, features, _, test_rows = _load(settings)
    if _fingerprint(data) != fingerprint:
        raise RunError(
            f"{path} was trained on other ratings than those from "
            f"{data.source}, so its test part is not known; use the data it "
            "was trained on"
        )
    model = keras.saving.load_model(path)
    predicted = _predict(model, features, test_rows, settings.batch_size)
    if predictions_path is not None:
        content = io.BytesIO()
        np.save(content, predicted)
        replace_file(Path(predictions_path), content.getvalue())
    return {
        "test_rmse": _rmse(predicted, data.rating[test_rows]),
        "baseline_rmse": _baseline_rmse(data, features, test_rows),
    }


def _load(
    settings: Settings,
) -> tuple[MovieLens, RatingFeatures, np.ndarray, np.ndarray]:
    data = load_movielens_100k(settings.data_dir, cache_dir=settings.cache_dir)
    try:
        train_rows, test_rows = data.split(
            settings.test_fraction, settings.seed
        )
    except ValueError as error:
        raise RunError(str(error)) from error
    features = RatingFeatures(
        data, train_rows, history_size=settings.history_size
    )
    return data, features, train_rows, test_rows


def _predict(
    model: keras.Model,
    features: RatingFeatures,
    rows: np.ndarray,
    batch_size: int,
) -> np.ndarray:
    batches = features.dataset(rows, batch_size).map(lambda inputs, _: inputs)
    predicted = model.predict(batches, verbose=0)[:, 0]
    return np.clip(predicted, LOWEST, HIGHEST)


def _rmse(predicted: np.ndarray, ratings: np.ndarray) -> float:
    errors = predicted.astype(np.float64) - ratings
    return float(np.sqrt(np.mean(np.square(errors))))


def _baseline_rmse(
    data: MovieLens, features: RatingFeatures, rows: np.ndarray
) -> float:
    return _rmse(features.item_mean[data.item[rows]], data.rating[rows])


def _fingerprint(data: MovieLens) -> str:
    """Changes with every rating, and with who rated what."""
    crc = 0
    for part in (data.user, data.item, data.rating):
        crc = zlib.crc32(part.tobytes(), crc)
    return f"{len(data.rating)}-{crc:08x}"


def _save(
    model: keras.Model, settings: Settings, data: MovieLens, folder: Path
) -> Path:
    path = (folder / MODEL_FILE).resolve()
    # A crash while saving leaves the model of the run before.
    with tempfile.TemporaryDirectory(dir=folder, prefix=".saving.") as scratch:
        complete = Path(scratch, MODEL_FILE)
        model.save(complete)
        os.replace(complete, path)
    # An evaluation may be started from another folder than the training.
    placed = {
        name: value and str(Path(value).expanduser().resolve())
        for name, value in (
            ("data_dir", settings.data_dir),
            ("cache_dir", settings.cache_dir),
        )
    }
    run = {
        "settings": dataclasses.asdict(settings) | placed,
        "data": _fingerprint(data),
    }
    replace_file(
        path.parent / RUN_FILE, (json.dumps(run, indent=2) + "\n").encode()
    )
    return path


def _read_run(path: Path) -> tuple[Settings, str]:
    try:
        run = json.loads(path.read_text(encoding="utf-8"))
        return Settings(**run["settings"]), run["data"]
    except (KeyError, TypeError, json.JSONDecodeError) as error:
        raise RunError(
            f"{path} is not what `train` writes beside a model: {error!r}"
        ) from error


def _predict_in_new_process(model_path: Path) -> np.ndarray:
    """Predictions of the saved model by a process that never saw this one."""
    # The package is found there as it was found here, installed or not.
    home = str(Path(__file__).resolve().parent.parent)
    search = [home, *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as scratch:
        predictions = os.path.join(scratch, "predictions.npy")
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "tf_distembed",
                "evaluate",
                f"--model={model_path}",
                f"--predictions={predictions}",
            ],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(search)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RunError(
                "the process that loads the model again ended with exit code "
                f"{done.returncode}:\n{done.stdout}{done.stderr}"
            )
        return np.load(predictions)
