"""The command line, and the rating model it trains, on made-up ratings."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.datasets.fake_movielens import SMALL, random_fake, write
from tf_distembed import rating_job
from tf_distembed.__main__ import COMMANDS, main
from tf_distembed.datasets import RatingFeatures, load_movielens_100k
from tf_distembed.rating_model import build_rating_model, rating_features

ROOT = Path(__file__).resolve().parent.parent


# --- without TensorFlow


@pytest.mark.parametrize(
    "arguments, code, said",
    [
        ([], 0, "train"),
        (["--help"], 0, "evaluate"),
        (["train", "--help"], 0, "--embedding_dim=16"),
        (["evaluate", "-h"], 0, "--model=runs/movielens/model.keras"),
        (["train", "--epoch=3"], 2, "epochs"),
    ],
)
def test_help_and_wrong_flags_do_not_import_tensorflow(arguments, code, said):
    done = subprocess.run(
        [
            sys.executable,
            "-X",
            "importtime",
            "-m",
            "tf_distembed",
            *arguments,
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    # "import time: self [us] | cumulative | imported package"
    lines = done.stderr.splitlines()
    told = [line for line in lines if not line.startswith("import time:")]
    imported = {line.split("|")[-1].strip() for line in lines}
    assert done.returncode == code, told
    assert said in ("\n".join(told) if code else done.stdout)
    # It would see them: these are what does get imported.
    assert {"tf_distembed", "absl.flags"} <= imported
    assert not {"tensorflow", "keras", "numpy"} & imported


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_is_explained(command, capsys):
    assert main([command, "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    flags = [n for n, line in enumerate(lines) if line.startswith("  --")]
    assert len(flags) >= 4
    for n in flags:
        assert lines[n + 1].startswith("      "), lines[n]
        assert lines[n + 1].strip(), lines[n]


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["tain"], "no command 'tain'; there are: train, evaluate"),
        (["train", "--epochs=0"], "--epochs=0"),
        (["train", "--epochs=many"], "--epochs=many"),
        (["train", "--test_fraction=1"], "must be between 0 and 1"),
        (["train", "--seed=-1"], "--seed=-1"),
        (["train", "ml-100k"], "not a flag: 'ml-100k'"),
        (["train", "--epochs"], "epochs"),
        (["evaluate", "--epochs=2"], "epochs"),
    ],
)
def test_a_wrong_call_ends_with_one_line_and_exit_code_2(
    arguments, said, capsys
):
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert said in line
    assert "--help" in line


# --- train and evaluate


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ratings")
    return write(folder, random_fake(seed=2).recbole_files())


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("run") / "deep" / "run"


@pytest.fixture(scope="module")
def trained(data_dir, run_dir) -> subprocess.CompletedProcess:
    """One whole `train` in a process of its own, from another folder."""
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "tf_distembed",
            "train",
            f"--data_dir={os.path.relpath(data_dir, run_dir.parent.parent)}",
            f"--output_dir={run_dir}",
            "--epochs=30",
            "--batch_size=32",
            "--embedding_dim=8",
        ],
        cwd=run_dir.parent.parent,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_train_beats_the_baseline_and_reloads_to_the_same_model(
    trained, run_dir, data_dir
):
    assert trained.returncode == 0, trained.stderr
    *lines, last = trained.stdout.splitlines()
    report = json.loads(last)
    assert set(report) == {
        "test_rmse",
        "baseline_rmse",
        "reload_max_abs_diff",
        "seconds",
    }
    # Ratings are 1 or 4 to 5, by match of taste and kind.
    assert report["test_rmse"] < 0.7 * report["baseline_rmse"]
    assert 0 <= report["reload_max_abs_diff"] <= 1e-6
    assert 0 < report["seconds"] < 600
    said = "\n".join(lines)
    assert "Epoch 30/30" in said
    assert "GroupLens Research" in said
    assert str(run_dir / "model.keras") in said
    assert sorted(os.listdir(run_dir)) == ["model.keras", "run.json"]


def test_evaluate_gives_what_train_gave(trained, run_dir, tmp_path, capsys):
    report = json.loads(trained.stdout.splitlines()[-1])
    predictions = tmp_path / "predictions.npy"
    code = main(
        [
            "evaluate",
            f"--model={run_dir / 'model.keras'}",
            f"--predictions={predictions}",
        ]
    )
    assert code == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert again["test_rmse"] == pytest.approx(report["test_rmse"], abs=1e-6)
    assert again["baseline_rmse"] == report["baseline_rmse"]
    predicted = np.load(predictions)
    assert predicted.dtype == np.float32
    assert predicted.min() >= 1.0
    assert predicted.max() <= 5.0


def test_evaluate_refuses_other_ratings_than_those_trained_on(
    trained, run_dir, tmp_path, capsys
):
    write(tmp_path, SMALL.grouplens_files())
    code = main(
        [
            "evaluate",
            f"--model={run_dir / 'model.keras'}",
            f"--data_dir={tmp_path}",
        ]
    )
    assert code == 1
    assert "trained on other ratings" in capsys.readouterr().err


def test_a_missing_model_data_or_damaged_run_is_one_clear_message(
    trained, run_dir, tmp_path, capsys
):
    assert main(["evaluate", f"--model={tmp_path / 'model.keras'}"]) == 1
    assert "run.json" in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"settings": {}}')
    assert main(["evaluate", f"--model={tmp_path / 'model.keras'}"]) == 1
    assert "not what `train` writes" in capsys.readouterr().err
    gone = tmp_path / "gone"
    output = f"--output_dir={tmp_path / 'out'}"
    assert main(["train", f"--data_dir={gone}", output]) == 1
    said = capsys.readouterr().err
    assert str(gone) in said
    assert "Traceback" not in said


def test_an_output_dir_that_cannot_be_made_is_refused_before_the_work(
    tmp_path, capsys
):
    file = tmp_path / "file"
    file.write_text("")
    assert main(["train", f"--output_dir={file / 'run'}"]) == 1
    captured = capsys.readouterr()
    assert str(file) in captured.err
    assert "MovieLens" not in captured.out


def test_a_process_that_cannot_load_the_model_is_told_of(tmp_path):
    model = tmp_path / "model.keras"
    with pytest.raises(
        rating_job.RunError,
        match=r"(?s)again ended with exit code 1:.*run\.json",
    ):
        rating_job._predict_in_new_process(model)


def test_a_save_that_breaks_off_leaves_the_earlier_model(
    data_dir, tmp_path, monkeypatch
):
    settings = rating_job.Settings(
        data_dir=str(data_dir),
        cache_dir=None,
        epochs=1,
        steps_per_epoch=1,
        batch_size=32,
        embedding_dim=4,
        history_size=5,
        test_fraction=0.1,
        seed=0,
    )
    (tmp_path / "model.keras").write_bytes(b"earlier")

    def break_off(model, path):
        Path(path).write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(keras.Model, "save", break_off)
    with pytest.raises(OSError, match="disk full"):
        rating_job.train(settings, str(tmp_path))
    assert (tmp_path / "model.keras").read_bytes() == b"earlier"
    assert os.listdir(tmp_path) == ["model.keras"]


# --- the model


@pytest.fixture(scope="module")
def features_and_rows(data_dir):
    data = load_movielens_100k(data_dir, report=lambda line: None)
    train, test = data.split(0.1, seed=0)
    return data, RatingFeatures(data, train, history_size=10), train, test


def untrained(features_and_rows) -> keras.Model:
    data, features, _, _ = features_and_rows
    keras.utils.set_random_seed(7)
    return build_rating_model(
        rating_features(data, 4, 10), features.mean_rating
    )


def fitted(features_and_rows) -> keras.Model:
    _, features, train, _ = features_and_rows
    model = untrained(features_and_rows)
    batches = features.dataset(train, 32, shuffle_seed=7)
    model.fit(batches, epochs=2, verbose=0, shuffle=False)
    return model


@pytest.fixture(scope="module")
def model(features_and_rows) -> keras.Model:
    return fitted(features_and_rows)


def test_training_repeats_with_the_seed(model, features_and_rows):
    _, features, _, test = features_and_rows
    (inputs, _), *_ = features.dataset(test, len(test))
    again = fitted(features_and_rows)
    np.testing.assert_allclose(model(inputs), again(inputs), atol=1e-5)


def test_each_table_is_trained_by_its_own_optimizer(model, features_and_rows):
    _, _, train, _ = features_and_rows
    before = untrained(features_and_rows).get_layer("embedding")
    layer = model.get_layer("embedding")
    state = layer.get_optimizer_state()
    slots = {name: set(table) - {"step"} for name, table in state.items()}
    assert slots == {
        "user": {"momentum", "velocity"},
        "item": {"accumulator"},
        "genre": {"accumulator"},
        "age_group": set(),
        "occupation": set(),
    }
    assert len(set(map(id, layer.table_optimizers.values()))) == 5
    steps = 2 * -(-len(train) // 32)
    after = layer.get_embedding_tables()
    for name, values in before.get_embedding_tables().items():
        assert int(state[name]["step"]) == steps
        assert np.abs(after[name] - values).max() > 0, name


@pytest.mark.parametrize("feature", ["genres", "history"])
def test_the_weights_of_a_bag_reach_the_prediction(
    model, features_and_rows, feature
):
    _, features, _, test = features_and_rows
    (inputs, _), *_ = features.dataset(test, len(test))
    weights = inputs[f"{feature}_weights"]
    longer = (inputs[feature].row_lengths() > 1).numpy()
    assert longer.any()
    # The first of a bag is left with hardly a word.
    quiet = weights.with_values(
        weights.values * tf.where(_is_first(weights), 1e-3, 1.0)
    )
    plain = model(inputs)[:, 0].numpy()
    changed = model(inputs | {f"{feature}_weights": quiet})[:, 0].numpy()
    assert (np.abs(plain - changed)[longer] > 1e-6).all()


def _is_first(ragged: tf.RaggedTensor) -> tf.Tensor:
    places = tf.range(tf.size(ragged.values, tf.int64))
    return places == tf.gather(ragged.row_starts(), ragged.value_rowids())
