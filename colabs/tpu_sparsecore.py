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
# # Tables on TPU SparseCores
#
# SparseCores are the parts of a Cloud TPU (v5p, v6e) that look up and train
# embedding tables. Here `DistributedEmbedding` puts its tables on them. The
# same cells run without a TPU: then an emulator takes its place, on which
# TensorFlow's own `TPUEmbeddingV2` runs, with logical CPUs for chips. It shows
# what is computed, not how fast.
#
# Nobody has run it on a TPU yet; `docs/tpu.md` says what was verified instead.
# Tables, features and bags are explained in `docs/quickstart.md`.


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
import contextlib

import keras
import numpy as np
import tensorflow as tf

import tf_distembed as tde

# Two logical CPUs, for the emulator: before TensorFlow starts.
tde.testing.prepare(2)
stack = contextlib.ExitStack()
try:
    strategy = tde.make_strategy("tpu")
    print("The tables will be on this TPU.")
except RuntimeError:
    strategy = stack.enter_context(
        tde.testing.sparsecore_emulator(num_chips=2, sparsecores_per_chip=4)
    )
    print("There is no TPU here: two emulated chips with 4 SparseCores each.")
with strategy.scope():
    if not tde.DistributedEmbedding.has_sparsecores():
        raise RuntimeError(
            "This TPU has no SparseCores. Take one of v5p or v6e, or a machine "
            "without a TPU, where the emulator stands in."
        )
REPLICAS = strategy.num_replicas_in_sync  # One on each chip.


# %% [markdown]
# ## Tables and features
#
# Nothing here is special to a TPU, but the buffers of a SparseCore have fixed
# sizes. So two things have to be known before the first step:
#
# * the global batch, which all chips together take in a step, as the first
#   entry of a shape. It is a multiple of the number of all SparseCores;
# * how many ids of a step may go from one SparseCore to another
#   (`max_ids_per_partition`; the default of 256 is enough here).
#
# `placement="auto"`, the default of a table, means SparseCores where there are
# any. Adagrad trains the items and Adam the users, each row by itself; the
# model's own optimizer is left with the dense layers.


# %%
GLOBAL_BATCH = 32 * REPLICAS
ITEMS, USERS, DIM = 500, 200, 8


def make_layer(**settings):
    uniform = keras.initializers.RandomUniform
    items = tde.TableConfig(
        "items",
        ITEMS,
        DIM,
        initializer=uniform(seed=1),
        optimizer=keras.optimizers.Adagrad(0.1),
    )
    users = tde.TableConfig(
        "users",
        USERS,
        DIM,
        initializer=uniform(seed=2),
        optimizer=keras.optimizers.Adam(0.01),
    )
    features = {
        "user": tde.FeatureConfig("user", users, (GLOBAL_BATCH,)),
        "item": tde.FeatureConfig("item", items, (GLOBAL_BATCH,)),
        "bought": tde.FeatureConfig("bought", items, (GLOBAL_BATCH, None)),
    }
    return tde.DistributedEmbedding(features, **settings)


def make_model(**settings):
    keras.utils.set_random_seed(0)
    layer = make_layer(name="embedding", **settings)
    ids = {
        "user": keras.Input((), dtype="int64", name="user"),
        "item": keras.Input((), dtype="int64", name="item"),
        "bought": keras.Input(
            (None,), dtype="int64", ragged=True, name="bought"
        ),
    }
    found = keras.layers.Concatenate()([*layer(ids).values()])
    hidden = keras.layers.Dense(16, activation="relu")(found)
    model = keras.Model(ids, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


# %% [markdown]
# ## Data, and training
#
# The batches are global. `tde.fit` divides them over the chips and sorts the
# ids for the SparseCores on the host. The last batch here is short: it is
# filled up, and what was added counts for nothing. What `update_stats=True`
# measures is shown further down.


# %%
rng = np.random.default_rng(0)
examples = 4 * GLOBAL_BATCH + 5
lengths = rng.integers(0, 5, examples)
ids = {
    "user": rng.integers(0, USERS, examples),
    "item": rng.integers(0, ITEMS, examples),
    "bought": tf.RaggedTensor.from_row_lengths(
        rng.integers(0, ITEMS, lengths.sum()), lengths
    ),
}
labels = (ids["item"] % 2 + ids["user"] % 3).astype("float32")[:, np.newaxis]
dataset = tf.data.Dataset.from_tensor_slices((ids, labels)).batch(GLOBAL_BATCH)

with strategy.scope():
    model = make_model(update_stats=True)
history = tde.fit(model, dataset, epochs=3, verbose=2)
assert history.history["loss"][-1] < history.history["loss"][0]


# %% [markdown]
# ## The same on a CPU
#
# The layer's promise is that the device makes no difference. So the same model
# is trained on one CPU, with the same global batches, and all tables, slots and
# step counts are compared. (Floats are added in another order, so the last
# digits differ.)


# %%
with tf.device("CPU:0"):
    on_cpu = make_model()
    tde.fit(on_cpu, dataset, epochs=3, verbose=0)


def layer_of(model):
    return model.get_layer("embedding")


def state_of(model):
    tables = layer_of(model).get_embedding_tables()
    state = {f"{name} values": values for name, values in tables.items()}
    for name, slots in layer_of(model).get_optimizer_state().items():
        state |= {f"{name} {slot}": value for slot, value in slots.items()}
    return {name: np.asarray(value) for name, value in state.items()}


expected = state_of(on_cpu)
for name, value in state_of(model).items():
    difference = np.abs(value - expected[name]).max()
    print(f"{name:20} {value.shape!s:10} largest difference {difference:.1e}")
    assert difference < 1e-3


# %% [markdown]
# ## A look at the outputs
#
# Tables on SparseCores are looked up by each chip for its part of the batch,
# in a compiled step. A call anywhere else says so.


# %%
one_batch = {name: value[:GLOBAL_BATCH] for name, value in ids.items()}
try:
    layer_of(model)(one_batch)
except RuntimeError as error:
    print("RuntimeError:", str(error).split(". ")[0])


@tf.function
def look_up(batch):
    return strategy.run(layer_of(model), args=(batch,))


batches = tf.data.Dataset.from_tensors(one_batch)
found = look_up(next(iter(tde.distribute_dataset(batches, strategy))))
parts = strategy.experimental_local_results(found["bought"])
print("'bought' on each chip:", [part.shape for part in parts])

expected = layer_of(on_cpu)(one_batch)["bought"]
np.testing.assert_allclose(np.concatenate(parts), expected, atol=1e-3)


# %% [markdown]
# ## Limits
#
# With `update_stats=True` the layer counts what the batches needed. Take the
# most that a run over real data shows, with some room, as the two limits of a
# `TableConfig`. A batch beyond a limit raises; it drops nothing in silence.


# %%
for stack_limits in layer_of(model).id_statistics()["limits"]:
    print(stack_limits)


# %% [markdown]
# ## Away from the TPU
#
# Tables are saved by name, without padding or sharding, so that they load on
# any device. Here those of the SparseCores are read by a layer on the CPU.


# %%
import tempfile

with tempfile.TemporaryDirectory() as folder:
    tde.save_tables(layer_of(model), folder, overwrite=True)
    with tf.device("CPU:0"):
        loaded = make_layer()
        tde.load_tables(loaded, folder)
tables = layer_of(model).get_embedding_tables()
for name, values in loaded.get_embedding_tables().items():
    np.testing.assert_array_equal(values, tables[name])
    print(name, values.shape, "are equal")


# %%
stack.close()  # Ends the emulator, if there was one.


# %% [markdown]
# ## What to do next
#
# * Set up a TPU's machine: `docs/tpu.md`. It also says what differs there.
# * Write the loop yourself: `custom_training_loop.ipynb`.
# * Train for longer, with backups: `docs/training.md`.
