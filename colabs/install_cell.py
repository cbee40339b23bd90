# Does nothing where tf_distembed can be imported. Elsewhere it installs it with
# the one TensorFlow that fits the machine, and first removes any other: pip
# would put two of them over each other without a word.
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


if importlib.util.find_spec("tf_distembed") is None:
    if not REPOSITORY:
        raise RuntimeError(
            "tf_distembed is not installed. In its checkout call: "
            "pip install -e '.[cpu]' (or [gpu], or [tpu] on a TPU's machine)"
        )
    to_remove, extra = tensorflow_plan(
        {
            d.metadata["Name"].lower().replace("_", "-"): d.version
            for d in distributions()
        },
        has_tpu=bool(glob.glob("/dev/accel*") or "TPU_NAME" in os.environ),
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
