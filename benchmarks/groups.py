"""The processes of the suite: each has an environment and its experiments."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from benchmarks import experiments, own_experiments, turns
from benchmarks.comparison import Effort

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUICK = Effort(rounds=7, warm_up=6, least_seconds=0.05)
FULL = Effort(rounds=15)

#: OpenMP's threads do not spin while another framework works.
_QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "OMP_WAIT_POLICY": "PASSIVE"}
#: Tables of TensorFlow, and of NumPy, on pages of one size.
_SMALL_PAGES = {"NUMPY_MADVISE_HUGEPAGE": "0"}
_HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


@dataclasses.dataclass(frozen=True)
class Group:
    """Experiments that share a process.

    Attributes:
        environment: `"tf"` or `"torch"`, of `setup.sh`.
        run: Yields the records.
        variables: Environment variables of the process.
        quick: Whether `--quick` runs it.
    """

    environment: str
    run: Callable[[Effort], Iterator[dict[str, Any]]]
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    quick: bool = False

    @property
    def python(self) -> pathlib.Path:
        """The interpreter that runs it."""
        return ROOT / f".venv-bench-{self.environment}" / "bin" / "python"

    @property
    def all_variables(self) -> dict[str, str]:
        """What is set beside the caller's own environment."""
        return {**_QUIET, **self.variables}


def _sizes(quick: bool) -> tuple[int, ...]:
    return (10**4, 10**6) if quick else (10**4, 10**5, 10**6, 10**7)


def _tensorflow_single(rows: int) -> Callable[[Effort], Iterator[Any]]:
    return lambda effort: experiments.tensorflow_single(
        rows, effort, quick=effort is QUICK
    )


def _torch_single(rows: int) -> Callable[[Effort], Iterator[Any]]:
    return lambda effort: experiments.torch_single(
        rows, effort, quick=effort is QUICK
    )


GROUPS: dict[str, Group] = {
    **{
        f"tf-A-{rows:.0e}".replace("e+0", "e"): Group(
            "tf", _tensorflow_single(rows), quick=rows == 10**6
        )
        for rows in _sizes(quick=False)
    },
    "tf-A-variants": Group("tf", experiments.tensorflow_variants),
    "tf-B": Group("tf", experiments.tensorflow_many, quick=True),
    **{
        f"torch-A-{rows:.0e}".replace("e+0", "e"): Group(
            "torch", _torch_single(rows), quick=rows == 10**6
        )
        for rows in _sizes(quick=False)
    },
    "torch-B": Group("torch", experiments.torch_many, quick=True),
    "tfrs": Group(
        "tf",
        lambda effort: experiments.recommenders(10**6, effort),
        {"TF_USE_LEGACY_KERAS": "1"},
    ),
    "floor": Group("tf", experiments.floor, _SMALL_PAGES, quick=True),
    "floor-huge-pages": Group("tf", experiments.floor, _HUGE_PAGES),
    "same-ids": Group(
        "tf",
        lambda effort: own_experiments.same_ids(
            _sizes(effort is QUICK), effort
        ),
        quick=True,
    ),
    "public-calls": Group(
        "tf",
        lambda effort: own_experiments.public_calls(10**6, effort),
        quick=True,
    ),
    "huge-pages": Group(
        "tf", lambda effort: own_experiments.huge_pages(10**6, effort)
    ),
    "settings": Group("tf", turns.settings),
    "memory": Group("tf", lambda effort: own_experiments.peak_memory(10**6)),
    "input": Group(
        "tf", lambda effort: own_experiments.input_pipeline(10**6, effort)
    ),
}
