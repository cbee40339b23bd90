"""Uses tf_distembed as it is installed for the interpreter that runs this.

    cd /somewhere/else && python /path/to/.ci/check_installed.py

Fails unless it is the installed package that is imported, its import takes less
than half a second beyond TensorFlow's and Keras' own, and a small model trains,
is saved, loaded and exported.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

IMPORT_SECONDS = 0.5
# The quickest of some: other processes slow an import down, nothing speeds it
# up. The first one of all writes the bytecode.
TRIES = 4

_TIMED = """
import keras
import tensorflow as tf
import time
began = time.process_time()
import tf_distembed
for name in tf_distembed.__all__:
    getattr(tf_distembed, name)
tf_distembed.testing
print(time.process_time() - began)
"""


def import_seconds() -> float:
    """Processor time of importing every public name, in new processes."""
    return min(
        float(
            subprocess.run(
                [sys.executable, "-c", _TIMED],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            ).stdout.split()[-1]
        )
        for _ in range(TRIES)
    )


def try_it(folder: Path) -> None:
    """A model from its tables to an export."""
    import keras
    import numpy as np
    import tensorflow as tf

    import tf_distembed as tde

    table = tde.TableConfig("films", 100, 8, optimizer="adagrad")
    layer = tde.DistributedEmbedding({"seen": tde.FeatureConfig("seen", table)})
    seen = keras.Input((None,), dtype="int64", ragged=True, name="seen")
    rating = keras.layers.Dense(1)(layer({"seen": seen})["seen"])
    model = keras.Model({"seen": seen}, rating)
    model.compile("adam", "mse")

    bags = tf.ragged.constant([[3, 5], [], [9, 9, 1]], dtype=tf.int64)
    dataset = tf.data.Dataset.from_tensor_slices(({"seen": bags}, np.ones(3)))
    before = layer.get_embedding_tables()["films"].numpy()
    tde.fit(model, dataset.batch(3), verbose=0)
    after = layer.get_embedding_tables()["films"].numpy()
    moved = np.flatnonzero((before != after).any(axis=1))
    assert moved.tolist() == [1, 3, 5, 9], moved

    expected = model.predict({"seen": bags}, verbose=0)
    model.save(folder / "model.keras")
    again = keras.saving.load_model(folder / "model.keras")
    found = again.predict({"seen": bags}, verbose=0)
    np.testing.assert_array_equal(found, expected)

    tde.export_for_serving(model, folder / "serving")
    serve = tf.saved_model.load(folder / "serving").signatures[
        "serving_default"
    ]
    (served,) = serve(
        seen_values=bags.values, seen_row_splits=bags.row_splits
    ).values()
    np.testing.assert_allclose(served, expected, rtol=1e-5)


def main() -> int:
    """Runs the checks; returns the exit status."""
    import tf_distembed

    home = Path(tf_distembed.__file__).resolve().parent
    if home == Path(__file__).resolve().parents[1] / "tf_distembed":
        print(f"{home} is a checkout, not an installed package.")
        return 1
    with tempfile.TemporaryDirectory() as folder:
        try_it(Path(folder))
    print(f"{home}: a model trains, is saved, loaded and exported")
    seconds = import_seconds()
    print(f"import: {seconds:.2f} s beyond TensorFlow's and Keras' own")
    return 0 if seconds < IMPORT_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
