"""The files around the package agree with each other and do what they say."""

from __future__ import annotations

import ast
import os
import re
import runpy
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).absolute().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

TENSORFLOWS = {"tensorflow", "tensorflow-cpu", "tensorflow-tpu", "tf-nightly"}


# --- setup.py and requirements.txt


@pytest.fixture(scope="module")
def setup_arguments() -> dict[str, Any]:
    """What setup.py hands to setuptools (which need not be installed)."""
    arguments: dict[str, Any] = {}
    fake = types.ModuleType("setuptools")
    fake.setup = arguments.update  # type: ignore[attr-defined]
    fake.find_packages = lambda include: include  # type: ignore[attr-defined]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "setuptools", fake)
        runpy.run_path(str(ROOT / "setup.py"))
    return arguments


def requirements(file: str) -> dict[str, Requirement]:
    lines = (ROOT / file).read_text(encoding="utf-8").splitlines()
    parsed = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(r.name): r for r in parsed}


def test_no_tensorflow_is_required_and_each_extra_brings_one(setup_arguments):
    required = [Requirement(r) for r in setup_arguments["install_requires"]]
    assert {r.name for r in required} == {"absl-py", "keras", "numpy"}
    for extra in ("cpu", "gpu", "tpu"):
        here = [
            r.name
            for r in map(Requirement, setup_arguments["extras_require"][extra])
            if r.marker is None or r.marker.evaluate()
        ]
        assert len(TENSORFLOWS.intersection(here)) == 1, extra


@pytest.mark.parametrize(
    ("system", "machine", "expected"),
    [
        ("linux", "x86_64", "tensorflow-cpu"),
        ("linux", "aarch64", "tensorflow"),
        ("darwin", "arm64", "tensorflow"),
        ("win32", "AMD64", "tensorflow"),
    ],
)
def test_the_cpu_extra_fits_the_machine(
    setup_arguments, system, machine, expected
):
    environment = {"sys_platform": system, "platform_machine": machine}
    chosen = [
        r.name
        for r in map(Requirement, setup_arguments["extras_require"]["cpu"])
        if r.marker is not None and r.marker.evaluate(environment)
    ]
    assert chosen == [expected]


def test_keras_3_15_0_and_older_than_3_12_are_excluded(setup_arguments):
    (keras,) = (
        r
        for r in map(Requirement, setup_arguments["install_requires"])
        if r.name == "keras"
    )
    allowed = ["3.12.0", "3.12.4", "3.14.0", "3.15.1"]
    refused = ["3.11.3", "3.15.0"]
    assert list(keras.specifier.filter(allowed + refused)) == allowed


def test_requirements_txt_names_the_packages_and_installs_one_tensorflow():
    found = requirements("requirements.txt")
    assert set(found) == {
        "absl-py",
        "keras",
        "numpy",
        "pytest",
        "tensorflow",
        "tensorflow-tpu",
    }
    marker = found["tensorflow-tpu"].marker
    assert marker is not None
    # A requirements file is read without any extra, so this never holds there.
    assert not marker.evaluate({"extra": ""})


def test_requirements_txt_has_the_versions_of_setup_py(setup_arguments):
    extras = setup_arguments["extras_require"]
    in_setup = {
        r.name: r.specifier
        for r in map(
            Requirement,
            [*setup_arguments["install_requires"], *sum(extras.values(), [])],
        )
    }
    for name, requirement in requirements("requirements.txt").items():
        assert requirement.specifier == in_setup[name], name


def test_the_version_is_the_same_everywhere(setup_arguments):
    version = setup_arguments["version"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+)", changes, re.MULTILINE)
    assert newest is not None
    assert newest[1] == version
    module = (ROOT / "MODULE.bazel").read_text(encoding="utf-8")
    assert f'    version = "{version}",\n)' in module
    import tf_distembed

    assert tf_distembed.__version__ == version


def test_every_folder_of_the_package_is_a_package():
    # setuptools leaves a folder without __init__.py out of the wheel.
    folders = {file.parent for file in (ROOT / "tf_distembed").rglob("*.py")}
    missing = [f for f in folders if not (f / "__init__.py").is_file()]
    assert missing == []


# --- BUILD


@pytest.fixture(scope="module")
def build() -> ast.Module:
    # What BUILD uses of Starlark is Python, too.
    return ast.parse((ROOT / "BUILD").read_text(encoding="utf-8"))


def rule(build: ast.Module, name: str) -> dict[str, ast.expr]:
    """The attributes of the top-level rule called `name`."""
    for statement in build.body:
        if not isinstance(statement, ast.Expr):
            continue
        if not isinstance(statement.value, ast.Call):
            continue
        attributes = {k.arg: k.value for k in statement.value.keywords if k.arg}
        given = attributes.get("name")
        if isinstance(given, ast.Constant) and given.value == name:
            return attributes
    raise AssertionError(f"BUILD has no rule named {name!r}")


def globbed(expression: ast.expr, **constants: list[str]) -> set[str]:
    """The files on disk that the one glob() in `expression` stands for.

    `constants` are the lists that BUILD calls by a name.
    """
    calls = [
        node
        for node in ast.walk(expression)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "glob"
    ]
    assert len(calls) == 1
    (call,) = calls

    def matches(patterns: ast.expr) -> set[str]:
        return {
            file.relative_to(ROOT).as_posix()
            for pattern in (
                constants[patterns.id]
                if isinstance(patterns, ast.Name)
                else ast.literal_eval(patterns)
            )
            for file in ROOT.glob(pattern)
            if file.is_file()
        }

    excluded = {k.arg: k.value for k in call.keywords}.get("exclude")
    return matches(call.args[0]) - (matches(excluded) if excluded else set())


def labels(expression: ast.expr) -> set[str]:
    """Every string in `expression`, globs' patterns aside."""
    return {
        node.value
        for node in ast.walk(expression)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }


def python_files(folder: str) -> set[str]:
    return {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / folder).rglob("*.py")
    }


def test_build_lists_every_test_file_once_in_order(build):
    (listed,) = (
        ast.literal_eval(statement.value)
        for statement in build.body
        if isinstance(statement, ast.Assign)
        and ast.unparse(statement.targets[0]) == "TEST_FILES"
    )
    on_disk = sorted(
        file
        for file in python_files("tests")
        if Path(file).name.startswith("test_")
    )
    assert listed == on_disk


LIBRARIES = ("core", "datasets", "testing", "command_line")


def sources(build: ast.Module, name: str) -> set[str]:
    """The files of one library of the package."""
    (command_line,) = (
        ast.literal_eval(statement.value)
        for statement in build.body
        if isinstance(statement, ast.Assign)
        and ast.unparse(statement.targets[0]) == "COMMAND_LINE"
    )
    if name == "command_line":
        return set(command_line)
    return globbed(rule(build, name)["srcs"], COMMAND_LINE=command_line)


def test_build_has_every_module_of_the_package_once(build):
    files = [file for name in LIBRARIES for file in sources(build, name)]
    assert sorted(files) == sorted(python_files("tf_distembed"))
    whole = labels(rule(build, "tf_distembed")["deps"])
    assert whole == {f":{name}" for name in LIBRARIES}


def test_build_has_each_library_that_another_one_imports(build):
    owner = {file: name for name in LIBRARIES for file in sources(build, name)}
    for file, name in owner.items():
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        imported = {
            f"{module.replace('.', '/')}{ending}"
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module
            for module in (
                node.module,
                *(f"{node.module}.{alias.name}" for alias in node.names),
            )
            for ending in (".py", "/__init__.py")
        }
        needed = {owner[one] for one in imported & owner.keys()} - {name}
        deps = labels(rule(build, name)["deps"])
        assert {f":{one}" for one in needed} <= deps, file


def test_build_has_what_the_tests_share(build):
    srcs = globbed(rule(build, "testing_support")["srcs"])
    shared = {
        file
        for file in python_files("tests")
        if not Path(file).name.startswith("test_")
    }
    assert srcs == shared


def test_build_has_what_measures(build):
    srcs = globbed(rule(build, "benchmark_suite")["srcs"])
    assert srcs == {
        file for file in python_files("benchmarks") if "/build/" not in file
    }


def test_build_depends_on_what_setup_py_requires(build, setup_arguments):
    deps = set().union(
        *(labels(rule(build, name)["deps"]) for name in LIBRARIES)
    )
    required = {
        Requirement(r).name for r in setup_arguments["install_requires"]
    }
    assert {one for one in deps if not one.startswith(":")} == required | {
        "tensorflow-cpu"
    }


def test_every_file_that_build_names_is_there(build):
    named = {
        node.value
        for node in ast.walk(build)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[\w./-]+\.(py|toml|txt|bazel|typed)", node.value)
    }
    assert len(named) > 5
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_lock_for_bazel_satisfies_setup_py(build, setup_arguments):
    locked = requirements("requirements_lock.txt")
    extras = setup_arguments["extras_require"]
    wanted = [*setup_arguments["install_requires"], *extras["test"]]
    wanted.append(next(r for r in extras["cpu"] if "tensorflow-cpu" in r))
    for text in wanted:
        requirement = Requirement(text)
        (pin,) = locked[canonicalize_name(requirement.name)].specifier
        assert pin.operator == "=="
        assert requirement.specifier.contains(pin.version), text
    # Each requirement("...") of BUILD is a package of the lock.
    used = {
        ast.literal_eval(node.args[0])
        for node in ast.walk(build)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "requirement"
    }
    assert used <= set(locked)


# --- README.md


def test_the_commands_of_the_readme_are_there():
    commands = re.findall(r"^    bash (\S+)", README, re.MULTILINE)
    assert commands == ["scripts/demo.sh", "scripts/test.sh"]
    for command in commands:
        assert os.access(ROOT / command, os.X_OK), command


def test_the_files_the_readme_links_to_are_there():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_code_of_the_readme_runs():
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) == 1
    names: dict[str, Any] = {}
    exec(compile(blocks[0], "README.md", "exec"), names)
    # Row 17 was in a bag, row 18 in none: what the README promises.
    table = names["layer"].get_embedding_tables()["movies"]
    names["model"].fit(names["examples"].batch(3), epochs=1, verbose=0)
    after = names["layer"].get_embedding_tables()["movies"]
    changed = abs(after - table).numpy().max(axis=-1).nonzero()[0]
    assert set(changed) == {4, 8, 17, 99_999}


# --- scripts/_environment.sh, on a machine whose Pythons are faked


FAKE_PYTHON = """#!/bin/sh
# A base interpreter, or (in bin/) that of an environment. Writes down what it
# is asked to do; only `-c` is done by the real one.
case "$1 $2" in
"-c "*) exec {real} "$@" ;;
"-m venv")
    echo "$@" >>{log}
    mkdir -p "$4/bin" && cp "$0" "$4/bin/python" ;;
"-m pip") [ "$3" = --version ] || echo "$@" >>{log}
    [ "$3" = --version ] || [ ! -e {no_network} ] ;;
"--version "*) echo Python 3.11.0 ;;
*) exit 64 ;;
esac
"""


class Checkout:
    """A checkout on a machine that has `sh`, its tools and a faked Python."""

    def __init__(self, folder: Path):
        self.root = folder / "check out"
        (self.root / "scripts").mkdir(parents=True)
        for name in ("setup.py", "requirements.txt", "scripts/_environment.sh"):
            text = (ROOT / name).read_text(encoding="utf-8")
            (self.root / name).write_text(text, encoding="utf-8")
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in ("sh", "bash", "cat", "cksum", "cp", "dirname", "env"):
            self.link(tool)
        for tool in ("flock", "mkdir", "rm"):
            self.link(tool)
        self.log = folder / "log"
        self.no_network = folder / "no_network"
        self.add_python("python3.11")

    def link(self, tool: str) -> None:
        for folder in ("/usr/bin", "/bin"):
            if Path(folder, tool).exists():
                (self.bin / tool).symlink_to(Path(folder, tool))
                return

    def add_python(self, name: str) -> None:
        text = FAKE_PYTHON.format(
            real=sys.executable, log=self.log, no_network=self.no_network
        )
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def ensure(self, *requirements: str) -> subprocess.CompletedProcess[str]:
        """Calls ensure_environment in a new shell; stdout is PYTHON."""
        program = (
            'set -euo pipefail; source "$1/scripts/_environment.sh"; shift;'
            'ensure_environment "$ROOT/.venv" "$@"; echo "$PYTHON"'
        )
        return subprocess.run(
            ["bash", "-c", program, "-", self.root, *requirements],
            env={"PATH": str(self.bin)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self) -> list[str]:
        """What the Pythons were asked to do since the last question."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_environment_is_made_once_and_then_reused(checkout):
    first = checkout.ensure()
    assert first.returncode == 0, first.stderr
    assert first.stdout == f"{checkout.root}/.venv/bin/python\n"
    made, installed = checkout.calls()
    assert made == f"-m venv --clear {checkout.root}/.venv"
    assert installed.startswith("-m pip install ")
    assert re.search(r"-e \S+ out\[(cpu,)?test\]$", installed)

    # No call of pip at all, so it works without a network, too.
    second = checkout.ensure()
    assert second.returncode == 0, second.stderr
    assert second.stdout == first.stdout
    assert second.stderr == ""
    assert checkout.calls() == []


@pytest.mark.parametrize("file", ["setup.py", "requirements.txt"])
def test_a_changed_pin_installs_again_into_the_same_environment(checkout, file):
    checkout.ensure()
    checkout.calls()
    with open(checkout.root / file, "a") as changed:
        changed.write("# another pin\n")
    assert checkout.ensure().returncode == 0
    (call,) = checkout.calls()
    assert call.startswith("-m pip install ")
    checkout.ensure()
    assert checkout.calls() == []


def test_other_requirements_install_again(checkout):
    checkout.ensure()
    checkout.calls()
    assert checkout.ensure("keras==3.12.*").returncode == 0
    (call,) = checkout.calls()
    assert call.endswith(" keras==3.12.*")


def test_a_failed_installation_is_an_error_and_is_tried_again(checkout):
    checkout.no_network.touch()
    failed = checkout.ensure()
    assert failed.returncode != 0
    assert "the installation failed" in failed.stderr
    assert failed.stdout == ""
    checkout.calls()

    checkout.no_network.unlink()
    assert checkout.ensure().returncode == 0
    (call,) = checkout.calls()
    assert call.startswith("-m pip install ")


def test_an_environment_without_its_python_is_made_anew(checkout):
    checkout.ensure()
    checkout.calls()
    (checkout.root / ".venv" / "bin" / "python").unlink()
    assert checkout.ensure().returncode == 0
    assert len(checkout.calls()) == 2


def test_without_a_suitable_python_the_error_says_what_to_install(checkout):
    (checkout.bin / "python3.11").write_text("#!/bin/sh\nexit 1\n")
    # The machine's own Pythons would be found under absolute paths.
    script = checkout.root / "scripts" / "_environment.sh"
    text = script.read_text().replace("/usr/bin/python3", "no-such-python")
    script.write_text(text)
    failed = checkout.ensure()
    assert failed.returncode != 0
    assert "no Python 3.11, 3.12 or 3.13" in failed.stderr
    assert "python3.11-venv" in failed.stderr
    assert checkout.calls() == []


# --- .ci


def run_stages(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", f"set -euo pipefail; source .ci/_stages.sh; {program}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


def test_stages_print_their_seconds_and_pass_on_success():
    done = run_stages("stage one true; stage two echo said; finish")
    assert done.returncode == 0
    assert re.search(r"^== one: \d+ s, exit status 0$", done.stdout, re.M)
    assert "said\n== two: " in done.stdout
    assert re.search(
        r"^== 2 stages took \d+ s\n"
        r"one: \d+ s, exit status 0\ntwo: \d+ s, exit status 0\n"
        r"all stages passed\n\Z",
        done.stdout,
        re.M,
    )


@pytest.mark.parametrize(
    "failing",
    [
        "bash -c 'exit 7'",
        # A failure in the middle of a function counts, as does one in a pipe.
        "f; f() { (exit 7); echo went on; }",
        "f; f() { (exit 7) | cat; echo went on; }",
        'f; f() { echo "$no_such_variable"; echo went on; }',
    ],
)
def test_a_stage_that_fails_is_named_at_the_end(failing):
    command, _, definition = failing.partition("; ")
    done = run_stages(
        f"{definition}\nstage one true; stage two {command};"
        "stage three echo said; stage four false; finish; echo went on"
    )
    assert done.returncode == 1
    assert "went on" not in done.stdout
    assert "said" in done.stdout
    assert re.search("^== two: 0 s, exit status [17]$", done.stdout, re.M)
    assert done.stdout.endswith(
        "four: 0 s, exit status 1\nFAILED: two\nFAILED: four\n"
    )


@pytest.mark.parametrize("script", ["run", "full"])
def test_a_run_of_stages_ends_with_what_failed(script):
    lines = (ROOT / ".ci" / script).read_text("utf-8").splitlines()
    assert "set -euo pipefail" in lines
    assert lines[-1] == "finish"


GOOD_DEMO = (
    '{"test_rmse": 0.92, "baseline_rmse": 1.01, "reload_max_abs_diff": 0.0,'
    ' "seconds": 99.5}'
)


def bad_demos() -> Iterator[tuple[str, str]]:
    yield "is not a JSON object", ""
    yield "is not a JSON object", "Epoch 1/4"
    yield "is not a JSON object", "[0.92]"
    yield "is not a JSON object", GOOD_DEMO + "\nbye"
    for key, value, complaint in [
        ("test_rmse", "0.95", "test_rmse is 0.95, above 0.94"),
        ("test_rmse", "NaN", "not a finite number"),
        ("baseline_rmse", "0.91", "does not beat the baseline"),
        ("reload_max_abs_diff", "0.01", "reload_max_abs_diff is 0.01"),
        ("reload_max_abs_diff", "null", "not a finite number"),
        ("seconds", '"99"', "not a finite number"),
    ]:
        yield (
            complaint,
            re.sub(f'"{key}": [^,}}]+', f'"{key}": {value}', GOOD_DEMO),
        )
    yield "test_rmse is None", GOOD_DEMO.replace("test_rmse", "rmse")


def check_demo(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    log = tmp_path / "demo.log"
    log.write_text(text)
    return subprocess.run(
        [sys.executable, ROOT / ".ci" / "check_demo.py", log],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_good_demo_is_accepted(tmp_path):
    done = check_demo(tmp_path, "Epoch 4/4\n" + GOOD_DEMO + "\n")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("complaint", "text"), list(bad_demos()))
def test_a_bad_demo_is_refused(tmp_path, complaint, text):
    done = check_demo(tmp_path, text)
    assert done.returncode == 1
    assert complaint in done.stderr
