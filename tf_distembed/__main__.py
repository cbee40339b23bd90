"""The command line: `python -m tf_distembed`.

TensorFlow takes ten seconds to import. Help and wrong flags are answered
without it, so what needs it is imported inside the commands.
"""

from __future__ import annotations

import dataclasses
import io
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

PROGRAM = "python -m tf_distembed"
DEFAULT_OUTPUT_DIR = os.path.join("runs", "movielens")

# 2 is what shells and argparse use for a command that was called wrongly.
FAILED, MISUSED, INTERRUPTED = 1, 2, 130


@dataclasses.dataclass(frozen=True)
class Command:
    """A command: what it does, its flags, and how to run it.

    What `run` returns becomes the last line of stdout, as JSON with the
    seconds it took.
    """

    summary: str
    define_flags: Callable[[flags.FlagValues], None]
    run: Callable[[dict[str, Any]], dict[str, Any]]


def _define_train_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "data_dir",
        None,
        "Folder with the files of MovieLens-100K. Without it the cache is "
        "read, and the data is downloaded if the cache is empty.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "cache_dir",
        "~/.cache/tf_distembed",
        "Folder that keeps downloaded data.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "output_dir",
        DEFAULT_OUTPUT_DIR,
        "Folder for model.keras and run.json; those of an earlier run are "
        "replaced.",
        flag_values=values,
    )
    for name, default, meaning in (
        ("epochs", 7, "Passes over the training ratings."),
        ("batch_size", 512, "Ratings in a step."),
        ("embedding_dim", 16, "Width of every table."),
        ("history_size", 50, "Most items in the history of a user."),
    ):
        flags.DEFINE_integer(
            name, default, meaning, lower_bound=1, flag_values=values
        )
    flags.DEFINE_integer(
        "steps_per_epoch",
        None,
        "End each epoch after so many steps, for a quick try.",
        lower_bound=1,
        flag_values=values,
    )
    flags.DEFINE_float(
        "test_fraction",
        0.1,
        "Part of the ratings to test on.",
        flag_values=values,
    )
    flags.register_validator(
        "test_fraction",
        lambda value: 0.0 < value < 1.0,
        message="must be between 0 and 1",
        flag_values=values,
    )
    flags.DEFINE_integer(
        "seed",
        0,
        "Decides the split, the first values and the order of the batches.",
        lower_bound=0,
        upper_bound=2**32 - 1,
        flag_values=values,
    )


def _train(values: dict[str, Any]) -> dict[str, Any]:
    from tf_distembed import rating_job

    output_dir = values.pop("output_dir")
    return rating_job.train(rating_job.Settings(**values), output_dir)


def _define_evaluate_flags(values: flags.FlagValues) -> None:
    flags.DEFINE_string(
        "model",
        os.path.join(DEFAULT_OUTPUT_DIR, "model.keras"),
        "The model that `train` wrote, with run.json beside it.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "data_dir",
        None,
        "Where the data is, if no longer where `train` found it.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "cache_dir",
        None,
        "Likewise for the cache.",
        flag_values=values,
    )
    flags.DEFINE_string(
        "predictions",
        None,
        "A .npy file to write, one prediction for each test rating.",
        flag_values=values,
    )


def _evaluate(values: dict[str, Any]) -> dict[str, Any]:
    from tf_distembed import rating_job

    return rating_job.evaluate(
        values["model"],
        data_dir=values["data_dir"],
        cache_dir=values["cache_dir"],
        predictions_path=values["predictions"],
    )


COMMANDS = {
    "train": Command(
        "Train a recommender on MovieLens-100K, save it, and evaluate it "
        "again in a new process. The last line is JSON.",
        _define_train_flags,
        _train,
    ),
    "evaluate": Command(
        "Evaluate a model that `train` saved, on the ratings it was not "
        "trained on. The last line is JSON.",
        _define_evaluate_flags,
        _evaluate,
    ),
}


def main(arguments: Sequence[str]) -> int:
    """Runs one command.

    Args:
        arguments: The command's name and its flags.

    Returns:
        The exit code: 0; 1 if the command failed; 2 if it was called wrongly.
    """
    if not arguments or arguments[0] in ("help", "--help", "-h"):
        print(_overview())
        return 0
    name, *rest = arguments
    if name not in COMMANDS:
        known = ", ".join(COMMANDS)
        return _complain(
            "", f"no command {name!r}; there are: {known}", MISUSED
        )
    command = COMMANDS[name]
    values = flags.FlagValues()
    command.define_flags(values)
    if {"--help", "-h"} & set(rest):
        print(_help(name, command, values))
        return 0
    try:
        surplus = values([name, *rest])[1:]
    except flags.Error as error:
        return _complain(name, str(error), MISUSED)
    if surplus:
        return _complain(name, f"not a flag: {surplus[0]!r}", MISUSED)
    return _run(name, command, values.flag_values_dict())


def _run(name: str, command: Command, values: dict[str, Any]) -> int:
    began = time.monotonic()
    # TensorFlow's C++ log would bury the progress; errors are still shown.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    from tf_distembed.rating_job import RunError

    try:
        result = command.run(values)
    except (RunError, OSError) as error:
        return _complain(name, str(error), FAILED)
    except KeyboardInterrupt:
        return _complain(name, "interrupted", INTERRUPTED)
    # Importing TensorFlow is part of what the user waits for.
    result["seconds"] = round(time.monotonic() - began, 2)
    print(json.dumps(result), flush=True)
    return 0


def _complain(name: str, message: str, code: int) -> int:
    who = f"{PROGRAM} {name}".strip()
    hint = f" (see {who} --help)" if code == MISUSED else ""
    print(f"{who}: {message}{hint}", file=sys.stderr)
    return code


def _overview() -> str:
    lines = [f"Usage: {PROGRAM} COMMAND [--flag=value ...]", ""]
    for name, command in COMMANDS.items():
        lines += [f"  {name}", _indented(command.summary)]
    lines += ["", f"{PROGRAM} COMMAND --help lists the flags of a command."]
    return "\n".join(lines)


def _help(name: str, command: Command, values: flags.FlagValues) -> str:
    lines = [
        f"Usage: {PROGRAM} {name} [--flag=value ...]",
        "",
        textwrap.fill(command.summary, 78),
        "",
    ]
    for flag in values:
        default = values[flag].default
        shown = "" if default is None else f"={default}"
        lines += [f"  --{flag}{shown}", _indented(values[flag].help)]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return textwrap.fill(
        text, 78, initial_indent=" " * 6, subsequent_indent=" " * 6
    )


if __name__ == "__main__":
    # Progress is seen as it is made, also through a pipe.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)
    sys.exit(main(sys.argv[1:]))
