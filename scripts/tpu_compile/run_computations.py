"""Runs the optimizers' computations on a CPU and compares their results.

    python run_computations.py FOLDER

Needs JAX. Takes what `lower.py` wrote into FOLDER: each computation with its
arguments, and the values that it must return.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from jax._src.lib import xla_client
from jax.extend.mlir import hlo_to_stablehlo

_RELATIVE, _ABSOLUTE = 1e-5, 1e-6


def run(content: bytes, args: list[Any]) -> list[np.ndarray]:
    """What a computation, a serialized HLO module, returns."""
    cpu = jax.devices("cpu")[0]
    executable = cpu.client.compile_and_load(
        hlo_to_stablehlo(content),
        xla_client.DeviceList((cpu,)),
        xla_client.CompileOptions(),
    )
    given = [jax.device_put(np.array(a, np.float32), cpu) for a in args]
    results = executable.execute_sharded(given)
    return [
        np.asarray(one)
        for (one,) in results.disassemble_into_single_device_arrays()
    ]


def main(folder: pathlib.Path) -> None:
    """Runs everything."""
    computations = json.loads((folder / "manifest.json").read_text())
    wrong = []
    for one in computations["computations"]:
        got = run((folder / one["file"]).read_bytes(), one["args"])
        for i, (value, expected) in enumerate(
            zip(got, one["out"], strict=True)
        ):
            if not np.allclose(value, expected, _RELATIVE, _ABSOLUTE):
                wrong.append(f"{one['name']}: result {i}: {value}, {expected}")
    if wrong:
        sys.exit("scripts/tpu_compile: optimizers differ:\n" + "\n".join(wrong))
    print(
        f"equal: {len(computations['computations'])} optimizer computations, "
        "with the layer's formulas and the kept values",
        flush=True,
    )


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
