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
# # A training loop of your own
#
# Three ways to the same result, from the most code to the least:
#
# 1. `strategy.run`: one step, and a Python loop around it;
# 2. `tf.range`: many steps in one compiled call;
# 3. the step helpers of `tf_distembed`: the same without writing the step.
#
# The cells run unchanged on a TPU, on GPUs, and on a CPU that is divided into
# two logical ones, so that there are two replicas there, too.


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
import keras
import numpy as np
import tensorflow as tf

import tf_distembed as tde

tf.get_logger().setLevel("WARNING")  # Not every exchange of the replicas.
tde.testing.prepare(2)  # Two logical CPUs; first, before TensorFlow starts.
strategy = tde.make_strategy()
has_gpu = bool(tf.config.list_logical_devices("GPU"))
if not has_gpu and not isinstance(strategy, tf.distribute.TPUStrategy):
    strategy = tde.make_strategy("mirrored", devices=["CPU:0", "CPU:1"])
REPLICAS = strategy.num_replicas_in_sync


# %% [markdown]
# ## Data
#
# Made up: films are of five kinds. A person has seen some films, mostly of one
# kind, and likes another film if it is of that kind. `seen` is ragged: a list
# of another length for each example, sometimes empty.


# %%
FILMS, KINDS, DIM = 200, 5, 8
GLOBAL_BATCH = 128 * REPLICAS
STEPS = 60  # An epoch.

rng = np.random.default_rng(0)
examples = GLOBAL_BATCH * STEPS
taste = rng.integers(0, KINDS, examples)
lengths = rng.integers(0, 8, examples)


def films_of(kinds):
    """A random film of each kind, sometimes of any: film i is of i % KINDS."""
    kinds = np.where(rng.random(len(kinds)) < 0.9, kinds, rng.integers(KINDS))
    return rng.integers(0, FILMS // KINDS, len(kinds)) * KINDS + kinds


seen = tf.RaggedTensor.from_row_lengths(
    films_of(np.repeat(taste, lengths)), lengths
)
film = films_of(np.where(rng.random(examples) < 0.5, taste, taste + 1) % KINDS)
liked = (film % KINDS == taste).astype("float32")[:, np.newaxis]

# Batches are global. One that is short would need another program on a TPU.
dataset = tf.data.Dataset.from_tensor_slices(
    ({"film": film, "seen": seen}, liked)
).batch(GLOBAL_BATCH, drop_remainder=True)


# %% [markdown]
# ## A model
#
# Both features look up in one table, which has an optimizer of its own. The
# model's optimizer trains the dense layers. Shapes carry the global batch.


# %%
def make_model():
    """A model and its optimizer, the same each time."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        films = tde.TableConfig(
            "films",
            2 * FILMS,  # Half of the rows wait for films to come.
            DIM,
            initializer=keras.initializers.RandomNormal(stddev=0.1),
            optimizer=keras.optimizers.Adam(0.02),
        )
        embedding = tde.DistributedEmbedding(
            {
                "film": tde.FeatureConfig("film", films, (GLOBAL_BATCH,)),
                "seen": tde.FeatureConfig("seen", films, (GLOBAL_BATCH, None)),
            },
            name="embedding",
        )
        ids = {
            "film": keras.Input((), dtype="int64", name="film"),
            "seen": keras.Input(
                (None,), dtype="int64", ragged=True, name="seen"
            ),
        }
        found = embedding(ids)
        both = keras.layers.Multiply()([found["film"], found["seen"]])
        hidden = keras.layers.Concatenate()([*found.values(), both])
        hidden = keras.layers.Dense(16, activation="relu")(hidden)
        model = keras.Model(ids, keras.layers.Dense(1)(hidden))
        # All variables exist before the first step is traced: in the scope of
        # several replicas a tf.function cannot make them.
        optimizer = keras.optimizers.Adam(0.01)
        optimizer.build(model.trainable_variables)
    return model, optimizer


def embedding_of(model):
    return model.get_layer("embedding")


def table_of(model):
    return embedding_of(model).get_embedding_tables()["films"].numpy()


# %% [markdown]
# ## 1. `strategy.run`
#
# Each replica gets its part of a batch and computes the loss and the gradients
# of that part. The optimizers sum the gradients of the replicas. So the loss is
# a sum divided by the **global** batch: a mean over a replica's own rows would
# count a replica with fewer rows for more.
#
# Compute the gradient once a step and apply it once. Then the loop means the
# same everywhere: on SparseCores tables move when the gradient is computed,
# elsewhere when it is applied.


# %%
bce = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")


def step_of(model, optimizer):
    """What one replica does with its part of a batch; returns its loss."""

    def step(batch):
        ids, labels = batch
        with tf.GradientTape() as tape:
            logits = model(ids, training=True)
            loss = tf.reduce_sum(bce(labels, logits)) / GLOBAL_BATCH
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    return step


model, optimizer = make_model()
step = step_of(model, optimizer)


@tf.function
def train_on(batch):
    losses = strategy.run(step, args=(batch,))
    return strategy.reduce("SUM", losses, axis=None)


distributed = tde.distribute_dataset(dataset, strategy)
losses = [float(train_on(batch)) for batch in distributed]
print(f"loss: {losses[0]:.3f} -> {losses[-1]:.3f} after {len(losses)} steps")
assert losses[-1] < losses[0]
first_loop = table_of(model)


# %% [markdown]
# Rows that no batch touched have not moved, and each row that moved took one
# step for all its occurrences in a batch, whichever replica had them.


# %%
touched = np.unique(np.concatenate([film, seen.values.numpy()]))
model_at_start, _ = make_model()
moved = np.flatnonzero((first_loop != table_of(model_at_start)).any(axis=1))
print(f"rows: {len(first_loop)}; rows that moved: {len(moved)}")
assert set(moved) <= set(touched)
print("steps:", embedding_of(model).get_optimizer_state()["films"]["step"])


# %% [markdown]
# The optimizer of a table is at hand: here its learning rate is halved, without
# compiling anything anew.


# %%
films_optimizer = embedding_of(model).table_optimizers["films"]
films_optimizer.learning_rate = 0.01
print(f"loss: {float(train_on(next(iter(distributed)))):.3f}")


# %% [markdown]
# ## 2. Many steps in one call: `tf.range`
#
# Python runs once a step above. Here it runs once an epoch: the loop over the
# iterator is compiled. (With `MultiWorkerMirroredStrategy` call a step at a
# time: TensorFlow keeps the size of the first exchange between workers.)


# %%
model, optimizer = make_model()
step = step_of(model, optimizer)


@tf.function
def train_for(iterator, steps):
    total = 0.0
    for _ in tf.range(steps):
        losses = strategy.run(step, args=(next(iterator),))
        total += strategy.reduce("SUM", losses, axis=None)
    return total / tf.cast(steps, tf.float32)


mean_loss = train_for(iter(distributed), tf.constant(STEPS))
print(f"mean loss of the epoch: {float(mean_loss):.3f}")
difference = np.abs(table_of(model) - first_loop).max()
print(f"largest difference to the first loop's table: {difference:.1e}")
assert difference < 1e-4


# %% [markdown]
# ## 3. The step helpers
#
# `make_train_step` writes that function: the same loss, gradients and rows, and
# the model's metrics. It takes a last batch that is short, too. `tde.fit` is a
# loop around it.


# %%
model, optimizer = make_model()
with strategy.scope():
    model.compile(
        optimizer,
        keras.losses.BinaryCrossentropy(from_logits=True),
        metrics=[keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
    )
train_step = tde.make_train_step(model, steps_per_call=20)

iterator = iter(distributed)
for _ in range(STEPS // 20):
    train_step.reset()  # The means begin anew.
    logs = {name: float(value) for name, value in train_step(iterator).items()}
    print({name: round(value, 3) for name, value in logs.items()})
difference = np.abs(table_of(model) - first_loop).max()
print(f"largest difference to the first loop's table: {difference:.1e}")
assert difference < 1e-4


# %% [markdown]
# ## Evaluating and predicting
#
# A short last batch is no problem: outputs come back in the order of the
# inputs, and without what was filled up.


# %%
eval_step = tde.make_eval_step(model)
for batch in distributed:
    logs = eval_step(batch)
print({name: round(float(value), 3) for name, value in logs.items()})
assert logs["accuracy"] > 0.7

predict_step = tde.make_predict_step(model)
few = tf.data.Dataset.from_tensors({"film": film[:5], "seen": seen[:5]})
(predicted,) = map(predict_step, tde.distribute_dataset(few, strategy))
print("predicted:", np.round(tf.sigmoid(predicted).numpy()[:, 0], 2))
print("liked:    ", liked[:5, 0])
