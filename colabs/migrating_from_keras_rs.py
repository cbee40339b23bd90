# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From Keras-RS, side by side
#
# Keras-RS has a `DistributedEmbedding`, too. Here one program is run with
# either import: the same configuration, the same model, equal outputs, and
# equal tables after training. Then come the things that differ.


# %% tags=["install"]
# Installs nothing where tf_distembed can be imported. Elsewhere it installs it
# with the one TensorFlow that fits the machine, and removes any other first:
# pip would put two of them over each other without a word.
import glob
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import distributions

REPOSITORY = ""  # "owner/name" on GitHub, once there is one


def tensorflow_plan(installed, has_tpu, has_gpu):
    """What to uninstall, and which extra of tf_distembed to install.

    `installed` is {distribution: version}. Both are empty if the only
    TensorFlow there is fits.
    """
    there = [
        name
        for name in ("tensorflow", "tensorflow-cpu", "tensorflow-tpu")
        if name in installed
    ]
    there += [name for name in installed if name.startswith("tf-nightly")]
    fits = [
        name
        for name in there
        if installed[name].startswith(("2.20.", "2.21."))
        and (name == "tensorflow-tpu") == has_tpu
    ]
    if len(there) == 1 and fits == there:
        return [], ""
    return there, "[tpu]" if has_tpu else "[gpu]" if has_gpu else "[cpu]"


# The files of its chips: of which kind depends on the machine's driver.
has_tpu = any(map(glob.glob, ("/dev/accel*", "/dev/vfio/[0-9]*"))) or any(
    name in os.environ for name in ("TPU_NAME", "TPU_ACCELERATOR_TYPE")
)
if importlib.util.find_spec("tf_distembed") is None:
    if not REPOSITORY:
        raise RuntimeError(
            "tf_distembed is not installed. In its checkout call: "
            "pip install -e '.[cpu]' (or [gpu], or [tpu] on a TPU's machine)"
        )
    to_remove, extra = tensorflow_plan(
        {
            str(d.metadata["Name"]).lower().replace("_", "-"): d.version
            for d in distributions()
        },
        has_tpu=has_tpu,
        has_gpu=os.path.exists("/dev/nvidia0"),
    )
    pip = [sys.executable, "-m", "pip"]
    if to_remove:
        subprocess.run([*pip, "uninstall", "--yes", *to_remove], check=True)
    source = f"git+https://github.com/{REPOSITORY}"
    subprocess.run(
        [*pip, "install", f"tf_distembed{extra} @ {source}"], check=True
    )
    if "tensorflow" in sys.modules:
        raise RuntimeError("Restart the runtime, then run this cell again.")

# TensorFlow reads these when it is imported: docs/tpu.md says whose they are.
if has_tpu and importlib.util.find_spec("libtpu") is not None:
    import libtpu

    for name, value in {
        "TPU_NAME": "local",
        "PJRT_DEVICE": "TPU",
        "NEXT_PLUGGABLE_DEVICE_USE_C_API": "true",
        "TF_PLUGGABLE_DEVICE_LIBRARY_PATH": libtpu.get_library_path(),
        "TF_XLA_FLAGS": "--tf_mlir_enable_mlir_bridge=true "
        "--tf_mlir_enable_convert_control_to_data_outputs_pass=true "
        "--tf_mlir_enable_merge_control_flow_pass=true",
    }.items():
        os.environ.setdefault(name, value)


# %%
# What only this notebook needs. It requires no TensorFlow, and brings none.
if importlib.util.find_spec("keras_rs") is None:
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "keras-rs==0.4.0",
        ],
        check=True,
    )


# %%
from importlib.metadata import version

import keras
import keras_rs
import numpy as np
import tensorflow as tf

import tf_distembed as tde

APIS = {"Keras-RS": keras_rs.layers, "tf_distembed": tde}
print("Keras-RS", version("keras-rs"), "beside TensorFlow", tf.__version__)
# The comparison runs where TensorFlow puts it: on a GPU or on the CPU.
print("device:", tf.zeros([]).device)


# %% [markdown]
# ## One program, two imports
#
# `api` is the only thing that differs. Two features share the table of movies;
# what was seen before comes as a ragged bag, whose rows are averaged.
#
# Off a TPU Keras-RS trains tables with the model's optimizer, whatever the
# table's own is. `optimizer=None` asks for the same here.


# %%
USERS, MOVIES, DIM, BATCH = 50, 80, 8, 32


def make_model(api, **table_settings):
    keras.utils.set_random_seed(0)
    users = api.TableConfig(
        name="users",
        vocabulary_size=USERS,
        embedding_dim=DIM,
        initializer="uniform",
        **table_settings,
    )
    movies = api.TableConfig(
        name="movies",
        vocabulary_size=MOVIES,
        embedding_dim=DIM,
        initializer="uniform",
        combiner="mean",
        **table_settings,
    )
    configs = {
        "user_id": api.FeatureConfig("user", users, (BATCH,), (BATCH, DIM)),
        "movie_id": api.FeatureConfig("movie", movies, (BATCH,), (BATCH, DIM)),
        "seen": api.FeatureConfig("seen", movies, (BATCH, None), (BATCH, DIM)),
    }
    model = Rating(api.DistributedEmbedding(configs))
    model.compile(keras.optimizers.SGD(0.5), "mse")
    return model


class Rating(keras.Model):
    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding
        self.join = keras.layers.Concatenate()
        self.rating = keras.layers.Dense(1)

    def call(self, ids):
        found = self.embedding(ids)
        names = ("user_id", "movie_id", "seen")
        return self.rating(self.join([found[name] for name in names]))


rng = np.random.default_rng(0)
examples = 10 * BATCH
lengths = rng.integers(1, 6, examples)
ids = {
    "user_id": rng.integers(0, USERS, examples),
    "movie_id": rng.integers(0, MOVIES, examples),
    "seen": tf.RaggedTensor.from_row_lengths(
        rng.integers(0, MOVIES, lengths.sum()), lengths
    ),
}
stars = (ids["user_id"] % 3 + ids["movie_id"] % 2).astype("float32")[:, None]
dataset = tf.data.Dataset.from_tensor_slices((ids, stars)).batch(BATCH)

models = {
    "Keras-RS": make_model(keras_rs.layers),
    "tf_distembed": make_model(tde, optimizer=None),
}
for model in models.values():
    model.predict(dataset.take(1), verbose=0)  # Builds it.
old, new = models.values()


# %% [markdown]
# ## Moving the tables
#
# Files of the two do not fit each other, but tables move by name. So do the
# weights of the dense layers.


# %%
new.embedding.set_embedding_tables(old.embedding.get_embedding_tables())
new.rating.set_weights(old.rating.get_weights())


def compare(what):
    """Prints both, and stops if they are not equal."""
    tables = {
        name: {
            table: np.asarray(values)
            for table, values in model.embedding.get_embedding_tables().items()
        }
        for name, model in models.items()
    }
    predicted = {
        name: model.predict(dataset, verbose=0)
        for name, model in models.items()
    }
    print(f"{what:24}{'Keras-RS':>12}{'tf_distembed':>14}{'difference':>12}")
    for name, (a, b) in {
        "first prediction": (p[0] for p in predicted.values()),
        "mean prediction": predicted.values(),
        "mean of table 'users'": (t["users"] for t in tables.values()),
        "mean of table 'movies'": (t["movies"] for t in tables.values()),
    }.items():
        difference = np.abs(a - b).max()
        print(f"{name:24}{a.mean():12.6f}{b.mean():14.6f}{difference:12.1e}")
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


compare("before training")


# %% [markdown]
# ## Training both


# %%
losses = {
    name: model.fit(dataset, epochs=4, shuffle=False, verbose=0).history["loss"]
    for name, model in models.items()
}
for epoch, (a, b) in enumerate(zip(*losses.values(), strict=True), 1):
    print(f"epoch {epoch}: loss {a:.6f} and {b:.6f}")
np.testing.assert_allclose(*losses.values(), rtol=1e-4)
compare("after training")


# %% [markdown]
# ## What differs: a table's own optimizer
#
# With a rate of 0 a table must not move. Keras-RS off a TPU does not ask the
# table's optimizer; here it takes the steps of its table, on every device.


# %%
for name, api in APIS.items():
    frozen = make_model(api, optimizer=keras.optimizers.SGD(0.0))
    frozen.predict(dataset.take(1), verbose=0)
    tables = frozen.embedding.get_embedding_tables()
    before = np.asarray(tables["movies"]).copy()
    frozen.fit(dataset, shuffle=False, verbose=0)
    after = np.asarray(frozen.embedding.get_embedding_tables()["movies"])
    print(f"{name:14} moved by {np.abs(after - before).max():.4f}")


# %% [markdown]
# ## What differs: ids outside of the table
#
# Here they raise, with the names of feature and table, or are dropped and
# counted (`invalid_ids="drop"`).


# %%
wrong = {name: value[:BATCH] for name, value in ids.items()}
wrong["movie_id"] = np.where(np.arange(BATCH) == 3, -1, wrong["movie_id"])
for name, model in models.items():
    try:
        rows = np.asarray(model.embedding(wrong)["movie_id"])
        table = np.asarray(model.embedding.get_embedding_tables()["movies"])
        (place,) = np.flatnonzero((table == rows[3]).all(axis=1))
        print(f"{name}: id -1 reads row {place}")
    except tf.errors.InvalidArgumentError as error:
        said = error.message[error.message.index("Feature") :].split('"')[0]
        print(f"{name}: {said}")


# %% [markdown]
# ## The migrated model on whatever is there
#
# With an optimizer for each table the model is ready for TPU SparseCores. On a
# TPU its tables are there now; elsewhere the same cell runs on GPUs or the CPU.


# %%
strategy = tde.make_strategy()
with strategy.scope():
    migrated = make_model(tde, optimizer="adagrad")
history = tde.fit(migrated, dataset, epochs=2, verbose=0).history
print("losses:", [round(loss, 4) for loss in history["loss"]])
assert history["loss"][1] < history["loss"][0]


# %% [markdown]
# `docs/migrating.md` has the whole list of differences.
