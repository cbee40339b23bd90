"""The command line: `python -m tf_distembed`.

TensorFlow takes ten seconds to import. Help and wrong flags are answered
without it, so modules that need it are imported inside the commands.
"""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

PROGRAM = "python -m tf_distembed"
DEFAULT_OUTPUT_DIR = os.path.join("runs", "movielens")

Command = Callable[[flags.FlagValues], dict[str, Any]]


def _data_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "data_dir",
        None,
        "Folder with the files of MovieLens-100K. Without it the cache is "
        "read, and the data is downloaded when that is empty.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "cache_dir",
        "~/.cache/tf_distembed",
        "Folder that keeps downloaded data.",
        flag_values=values,
    )


def _train_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    _data_flags(values)
    flags.DEFINE_string(
        "output_dir",
        DEFAULT_OUTPUT_DIR,
        "Folder for model.keras and run.json; those of an earlier run are "
        "replaced.",
        flag_values=values,
    )
    for name, default, help_text in (
        ("epochs", 8, "Passes over the training ratings."),
        ("batch_size", 512, "Ratings a step."),
        ("embedding_dim", 16, "Width of every table."),
        ("history_size", 50, "Most items in a user's history."),
    ):
        flags.DEFINE_integer(
            name, default, help_text, lower_bound=1, flag_values=values
        )
    flags.DEFINE_integer(
        "steps_per_epoch",
        0,
        "Ends an epoch after so many steps, for a quick try; 0: all.",
        lower_bound=0,
        flag_values=values,
    )
    flags.DEFINE_float(
        "test_fraction",
        0.1,
        "Part of the ratings to test on.",
        lower_bound=0.0,
        upper_bound=1.0,
        flag_values=values,
    )
    flags.DEFINE_integer(
        "seed",
        0,
        "Decides the split, the order of the batches and the first values.",
        lower_bound=0,
        upper_bound=2**32 - 1,
        flag_values=values,
    )
    return values


def _train(values: flags.FlagValues) -> dict[str, Any]:
    from tf_distembed import rating_job

    return rating_job.train(
        rating_job.Settings(
            **{
                name: values[name].value
                for name in rating_job.Settings.__dataclass_fields__
            }
        ),
        values["output_dir"].value,
    )


def _evaluate_flags() -> flags.FlagValues:
    values = flags.FlagValues()
    flags.DEFINE_string(
        "model",
        os.path.join(DEFAULT_OUTPUT_DIR, "model.keras"),
        "The model that `train` wrote, with run.json beside it.",
        flag_values=values,
    )
    _data_flags(values)
    # The run knows where its data was.
    for name in ("data_dir", "cache_dir"):
        values[name].using_default_value = True
    flags.DEFINE_string(
        "predictions",
        None,
        "A .npy file to write: one prediction for each test rating.",
        flag_values=values,
    )
    return values


def _evaluate(values: flags.FlagValues) -> dict[str, Any]:
    from tf_distembed import rating_job

    return rating_job.evaluate(
        values["model"].value,
        data_dir=values["data_dir"].value,
        cache_dir=values["cache_dir"].value,
        predictions_path=values["predictions"].value,
    )
