"""The guard sees only faked distributions here, each in a fresh process.

A process a case, as in this one TensorFlow and Keras may be imported already;
none of them imports either, so each takes milliseconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).absolute().parent.parent
GUARD = ROOT / "tf_distembed" / "_tensorflow_guard.py"

# A TensorFlow or Keras that is imported although the guard must not.
BOMB = "raise SystemExit('imported, though the guard must not import it')"

RUN_GUARD = f"""
import runpy
guard = runpy.run_path({str(GUARD)!r})
before = dict(os.environ)
try:
    guard["check_tensorflow"]()
except ImportError as error:
    print(error, end="")
assert dict(os.environ) == before, "the guard changed the environment"
assert "tensorflow" not in sys.modules, "the guard imported tensorflow"
"""

CPU_COMMAND = 'pip install "tf_distembed[cpu]"'


class Machine:
    """A folder that stands for everything installed on a machine."""

    def __init__(self, tmp_path: Path):
        self.site = tmp_path / "site"
        self.home = tmp_path / "home"
        self.site.mkdir()
        self.home.mkdir()
        self.environment: dict[str, str] = {}

    def module(self, name: str, text: str = BOMB) -> Machine:
        (self.site / name).mkdir()
        (self.site / name / "__init__.py").write_text(text)
        return self

    def distribution(self, name: str, version: str = "2.21.0") -> Machine:
        folder = self.site / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        return self

    def python(self, program: str) -> str:
        """Runs `program` with the standard library and this folder only."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("KERAS_", "PYTHON"))
        }
        environment |= {"HOME": str(self.home)} | self.environment
        head = f"import os, sys\nsys.path.append({str(self.site)!r})\n"
        done = subprocess.run(
            # -S: nothing of the real site-packages; -I: nor of this folder.
            [sys.executable, "-I", "-S", "-c", head + program],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def complaint(self) -> str:
        """What the guard says on this machine; empty when it is content."""
        return self.python(RUN_GUARD)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.mark.parametrize(
    "name",
    ["tensorflow", "tensorflow-cpu", "tensorflow_tpu", "tf-nightly-cpu"],
)
def test_one_tensorflow_is_accepted(machine, name):
    machine.module("tensorflow").distribution(name)
    assert machine.complaint() == ""


def test_no_tensorflow_raises_with_the_command_that_installs_it(machine):
    message = machine.distribution("numpy").complaint()
    assert "needs TensorFlow, which is not installed" in message
    assert CPU_COMMAND in message


@pytest.mark.parametrize(
    "pair",
    [
        ("tensorflow", "tensorflow-cpu"),
        ("tensorflow-cpu", "tensorflow-tpu"),
        ("Tensorflow_CPU", "tensorflow.tpu"),
        ("tensorflow", "tf-nightly"),
        ("tensorflow-cpu", "tf-nightly-tpu"),
        ("tf-nightly", "tf_nightly_cpu"),
    ],
    ids="+".join,
)
def test_two_tensorflows_raise_with_the_command_that_mends_it(machine, pair):
    machine.module("tensorflow")
    for name in pair:
        machine.distribution(name, "2.20.0")
    message = machine.complaint()
    installed = [re.sub(r"[_.]", "-", name).lower() for name in pair]
    for name in installed:
        assert f"{name} 2.20.0" in message
    uninstall = " ".join(sorted(installed))
    assert f"pip uninstall -y {uninstall} && {CPU_COMMAND}" in message


def test_one_tensorflow_listed_twice_is_no_clash(machine):
    # An editable install or a repeated sys.path entry lists a name twice.
    machine.module("tensorflow")
    machine.distribution("tensorflow-cpu", "2.20.0")
    machine.distribution("tensorflow-cpu", "2.21.0")
    assert machine.complaint() == ""


@pytest.mark.parametrize(
    "name",
    [
        "tensorflow-datasets",
        "tensorflow-io",
        "tf-keras-nightly",
        "tensorflow-intel",
        "tf-nightly-intel",
        "tf-nightly-macos",
    ],
)
def test_packages_that_only_sound_like_tensorflow_are_no_clash(machine, name):
    machine.module("tensorflow").distribution("tf-nightly")
    machine.distribution(name)
    assert machine.complaint() == ""


def test_tensorflow_without_metadata_is_accepted(machine):
    machine.module("tensorflow")
    assert machine.complaint() == ""


def test_metadata_folders_without_a_name_are_passed_over(machine):
    machine.module("tensorflow").distribution("tensorflow-cpu")
    (machine.site / "tensorflow-2.19.0.dist-info").mkdir()
    (machine.site / "odd-1.0.dist-info").mkdir()
    (machine.site / "odd-1.0.dist-info" / "METADATA").write_text("Version: 1\n")
    assert machine.complaint() == ""


def test_tensorflow_whose_files_are_gone_raises(machine):
    # What is left when one of two TensorFlows was uninstalled.
    machine.distribution("tensorflow-cpu")
    (machine.site / "tensorflow" / "core").mkdir(parents=True)
    message = machine.complaint()
    assert "the files of tensorflow-cpu are gone" in message
    assert f"pip uninstall -y tensorflow-cpu && {CPU_COMMAND}" in message


def test_a_tensorflow_that_is_imported_already_is_accepted(machine):
    program = (
        "import types\nsys.modules['tensorflow'] = types.ModuleType('t')\n"
    )
    body = RUN_GUARD.replace('assert "tensorflow" not in', "#")
    assert machine.python(program + body) == ""


@pytest.mark.parametrize("backend", ["", "tensorflow"])
def test_keras_backend_unset_or_tensorflow_is_accepted(machine, backend):
    machine.module("tensorflow")
    machine.environment["KERAS_BACKEND"] = backend
    assert machine.complaint() == ""


def test_another_keras_backend_in_the_environment_raises(machine):
    machine.module("tensorflow")
    machine.environment["KERAS_BACKEND"] = "jax"
    message = machine.complaint()
    assert "environment variable KERAS_BACKEND asks for" in message
    assert "'jax'" in message
    assert "export KERAS_BACKEND=tensorflow" in message


def test_another_keras_backend_in_the_configuration_file_raises(machine):
    machine.module("tensorflow")
    file = machine.home / ".keras" / "keras.json"
    file.parent.mkdir()
    file.write_text('{"backend": "torch"}')
    message = machine.complaint()
    assert str(file) in message
    assert "'torch'" in message


def test_the_environment_wins_over_the_configuration_file(machine):
    machine.module("tensorflow")
    machine.environment["KERAS_BACKEND"] = "tensorflow"
    machine.environment["KERAS_HOME"] = str(machine.home)
    (machine.home / "keras.json").write_text('{"backend": "jax"}')
    assert machine.complaint() == ""
    machine.environment["KERAS_BACKEND"] = ""
    assert "keras.json asks for the backend 'jax'" in machine.complaint()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"floatx": "float32"}'])
def test_a_configuration_file_without_a_backend_is_passed_over(machine, text):
    machine.module("tensorflow")
    machine.environment["KERAS_HOME"] = str(machine.home)
    (machine.home / "keras.json").write_text(text)
    assert machine.complaint() == ""


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_a_keras_that_is_imported_already_decides(machine, backend):
    # The environment variable no longer matters then, so it says the opposite.
    machine.module("tensorflow")
    other = {"jax": "tensorflow", "tensorflow": "jax"}[backend]
    machine.environment["KERAS_BACKEND"] = other
    program = (
        "import types\n"
        "keras = sys.modules['keras'] = types.ModuleType('keras')\n"
        "keras.config = types.ModuleType('keras.config')\n"
        f"keras.config.backend = lambda: {backend!r}\n"
    )
    message = machine.python(program + RUN_GUARD)
    if backend == "tensorflow":
        assert message == ""
    else:
        assert "imported with the backend 'jax'" in message


def test_the_package_asks_the_guard_before_it_imports_anything(machine):
    for name in ("tensorflow", "keras", "numpy", "absl"):
        machine.module(name)
    machine.distribution("tensorflow").distribution("tensorflow-tpu")
    program = f"""
sys.path.insert(0, {str(ROOT)!r})
try:
    import tf_distembed
except ImportError as error:
    print(error, end="")
"""
    assert "needs one TensorFlow" in machine.python(program)
