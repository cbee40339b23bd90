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
# # Quick start: films that people like
#
# This notebook trains a small recommender on MovieLens-100K: 100,000 ratings
# of 1,682 films by 943 people. Then it asks the table of films which of them
# are alike. It takes a minute or two on a CPU.


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
# What only this notebook needs.
if importlib.util.find_spec("matplotlib") is None:
    subprocess.run(
        [sys.executable, "-m", "pip", "install", "matplotlib"], check=True
    )


# %%
import keras
import matplotlib.pyplot as plt
import numpy as np

import tf_distembed as tde

keras.utils.set_random_seed(0)
# A TPU if there is one, else GPUs, else the CPU; it says which.
strategy = tde.make_strategy()


# %% [markdown]
# ## The data
#
# A rating comes with its user, its film, the film's genres, and other films
# that the user rated ("history"). Genres and history are bags: each example has
# another number of ids. The weights of a history say how much more the user
# liked a film than others did.


# %%
data = tde.datasets.load_movielens_100k()
train_rows, test_rows = data.split(test_fraction=0.1, seed=0)
ratings = tde.datasets.RatingFeatures(data, train_rows, history_size=50)

BATCH = 512  # The global batch: that of all replicas together.
FEATURES = ("user", "item", "genres", "history")
WEIGHTED = ("genres", "history")


def as_inputs(inputs, rating):
    ids = {name: inputs[name] for name in FEATURES}
    weights = {name: inputs[f"{name}_weights"] for name in WEIGHTED}
    return (ids, weights), rating


def batches(rows, shuffle_seed=None):
    dataset = ratings.dataset(rows, BATCH, shuffle_seed=shuffle_seed)
    return dataset.map(as_inputs)


(ids, _), rating = next(iter(batches(train_rows)))
for name, value in ids.items():
    print(f"{name:8} {value[0].numpy()}")
print(f"rating   {rating[0].numpy()}")


# %% [markdown]
# ## Tables and features
#
# A table has rows and an optimizer of its own. A feature looks up in a table,
# and two features may share one: `item` and `history` do. So the row of a film
# is learned from its ratings and from the histories that it stands in.


# %%
DIM = 16


def table(name, rows, optimizer, **settings):
    return tde.TableConfig(
        name,
        rows,
        DIM,
        initializer=keras.initializers.RandomNormal(stddev=0.05),
        optimizer=optimizer,
        **settings,
    )


users = table("user", data.num_users, keras.optimizers.Adam(0.002))
# "sqrtn": weights of both signs add up, and a long history is no louder.
# The two limits are for SparseCores, whose buffers have a fixed size.
items = table(
    "item",
    data.num_items,
    keras.optimizers.Adagrad(0.1),
    combiner="sqrtn",
    max_ids_per_partition=4096,
    max_unique_ids_per_partition=1024,
)
genres = table("genre", len(data.genre_names), keras.optimizers.Adagrad(0.05))

features = {
    "user": tde.FeatureConfig("user", users, (BATCH,), (BATCH, DIM)),
    "item": tde.FeatureConfig("item", items, (BATCH,), (BATCH, DIM)),
    "genres": tde.FeatureConfig("genres", genres, (BATCH, None), (BATCH, DIM)),
    "history": tde.FeatureConfig("history", items, (BATCH, 50), (BATCH, DIM)),
}


# %% [markdown]
# ## The model
#
# How well a person and a film match is in the products of their vectors. A
# small dense network makes stars of them.


# %%
class Ratings(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = tde.DistributedEmbedding(features)
        self.hidden = keras.layers.Dense(32, activation="relu")
        self.stars = keras.layers.Dense(
            1,
            bias_initializer=keras.initializers.Constant(ratings.mean_rating),
        )

    def call(self, inputs):
        ids, weights = inputs
        found = self.embedding(ids, dict.fromkeys(ids) | weights)
        liked = found["user"], found["history"]
        matches = [
            one * other
            for one in liked
            for other in (found["item"], found["genres"])
        ]
        together = keras.ops.concatenate([*found.values(), *matches], -1)
        return self.stars(self.hidden(together))


with strategy.scope():
    model = Ratings()
    model.compile(
        keras.optimizers.Adam(0.001),
        "mse",
        metrics=[keras.metrics.RootMeanSquaredError(name="rmse")],
    )


# %% [markdown]
# ## Training
#
# `tde.fit` takes what `model.fit` takes, and runs on every strategy with ragged
# data. Each step reads and writes the rows of its batch only.


# %%
EPOCHS = 7
history = tde.fit(
    model,
    batches(train_rows, shuffle_seed=0),
    epochs=EPOCHS,
    validation_data=batches(test_rows),
    verbose=2,
)


# %% [markdown]
# The mean rating of each film is what the model has to beat.


# %%
errors = ratings.item_mean[data.item[test_rows]] - data.rating[test_rows]
baseline = float(np.sqrt(np.mean(np.square(errors))))
reached = history.history["val_rmse"][-1]
print(f"test RMSE: {reached:.3f}; that of the mean ratings: {baseline:.3f}")
assert reached < baseline

epochs = range(1, EPOCHS + 1)
plt.figure(figsize=(6, 4))
plt.plot(epochs, history.history["rmse"], marker="o", label="training")
plt.plot(epochs, history.history["val_rmse"], marker="o", label="test")
plt.axhline(baseline, color="gray", linestyle="--", label="mean of the film")
plt.xlabel("epoch")
plt.ylabel("RMSE, stars")
plt.legend()
plt.show()


# %% [markdown]
# ## The nearest films of a film
#
# `get_embedding_tables` gives copies of all tables by name. Films whose rows
# point the same way are liked by the same people. Films with few ratings have
# rows that hardly moved, so they are left out.


# %%
rows = model.embedding.get_embedding_tables()["item"].numpy()
counts = np.bincount(data.item[train_rows], minlength=data.num_items)
known = np.flatnonzero(counts >= 50)
centered = rows[known] - rows[known].mean(axis=0)
directions = centered / np.linalg.norm(centered, axis=1, keepdims=True)


def nearest(title, count=5):
    """The `count` films most like one, with the cosines of their angles."""
    place = [data.titles[i] for i in known].index(title)
    cosines = directions @ directions[place]
    order = [i for i in np.argsort(-cosines) if i != place][:count]
    return [(data.titles[known[i]], float(cosines[i])) for i in order]


by_count = known[np.argsort(-counts[known])]
for film in by_count[:4]:
    print(f"{data.titles[film]} ({data.years[film]})")
    for title, cosine in nearest(data.titles[film]):
        print(f"    {cosine:5.2f}  {title}")


# %% [markdown]
# ## A map of the films
#
# The two directions in which the rows differ most (principal components). Near
# each other are films that the same people like. The names are those of the
# films with the most ratings.


# %%
_, _, axes = np.linalg.svd(centered, full_matrices=False)
places = dict(zip(known, centered @ axes[:2].T, strict=True))

plt.figure(figsize=(9, 7))
first_genre = {
    film: data.genre_names[data.genres[data.genre_splits[film]]]
    for film in known
}
common = ["Action", "Comedy", "Drama"]
for genre in [*common, "other"]:
    of_genre = [
        places[film]
        for film in known
        if first_genre[film] == genre
        or (genre == "other" and first_genre[film] not in common)
    ]
    plt.scatter(*np.transpose(of_genre), s=12, alpha=0.6, label=genre)
for film in by_count[:25]:
    plt.annotate(data.titles[film][:18], places[film], fontsize=8)
plt.legend(title="first genre")
plt.title("Rows of the table of films")
plt.show()


# %% [markdown]
# ## What to do next
#
# * Keep the model: `model.save("model.keras")` has tables and optimizer state.
# * Write the loop yourself: `custom_training_loop.ipynb`.
# * Put the tables on SparseCores: `tpu_sparsecore.ipynb`.
#
# MovieLens-100K belongs to GroupLens Research, University of Minnesota (Harper
# and Konstan 2015, doi:10.1145/2827872). It is free for research.
