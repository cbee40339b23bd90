"""Compiles lowered programs with the TPU's compiler; needs no TPU.

    python compile_programs.py FOLDER

Needs JAX and libtpu, no TensorFlow. Takes what `lower.py` wrote into FOLDER
and checks that each program compiles, or is refused where it should be.
Writes `result.json` there, on one line: for each topology with SparseCores
what the compiler made.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import sys
import time
from typing import Any

# The programs are for another machine's TPU; here, there is a CPU.
os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling needs no TPU, and so neither its metadata server nor its lock.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"
os.environ["TPU_WORKER_HOSTNAMES"] = "localhost"
# With it, JAX would not load the compiler's library either.
os.environ.pop("TPU_LOAD_LIBRARY", None)

from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax.experimental import topologies
from jax.extend.mlir import hlo_to_stablehlo
from jaxlib.mlir import ir


def compile_for(content: bytes, topology: str, chips: int) -> Any:
    """The program of one chip, as an executable.

    Args:
        content: A serialized HLO module.
        topology: Such as `"v5p:2x2x1"`.
        chips: Chips, each of which runs one replica.
    """
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    )
    devices = tuple(described.devices)
    assert len(devices) == chips, devices
    module = ir.Module.parse(
        hlo_to_stablehlo(content), context=mlir.make_ir_context()
    )
    options = xla_client.CompileOptions()
    options.num_replicas, options.num_partitions = chips, 1
    return devices[0].client.compile(
        module, xla_client.DeviceList(devices), options
    )


def figures(executable: Any, seconds: float) -> dict[str, Any]:
    """What the compiler made of a program."""
    (module,) = executable.hlo_modules()
    text = module.to_string()
    return {
        "sparsecore_instructions": text.count('execution_thread="sparsecore"'),
        "seconds": round(seconds, 1),
        "temp_bytes": executable.get_compiled_memory_stats().temp_size_in_bytes,
    }


def host_exchanges(executable: Any) -> list[str]:
    """Instructions of a compiled program that wait for the host."""
    (module,) = executable.hlo_modules()
    return [
        line.strip()[:200]
        for line in module.to_string().splitlines()
        if re.search(r"is_host_transfer=true|\b(in|out)feed\(|callback", line)
    ]


def compile_program(folder: pathlib.Path, program: dict[str, Any]) -> Any:
    """Compiles one program; its figures, or None if it was to be refused."""
    content = (folder / program["file"]).read_bytes()
    name, refused = program["name"], program["refused"]
    began = time.monotonic()
    try:
        executable = compile_for(content, program["topology"], program["chips"])
    except Exception as error:
        if not refused or refused not in str(error):
            raise
        print(f"refused, as it should be: {name}", flush=True)
        return None
    if refused:
        sys.exit(f"scripts/tpu_compile: {name}: the compiler takes it.")
    found = figures(executable, time.monotonic() - began)
    print(f"compiled: {name}: {found}", flush=True)
    if exchanges := host_exchanges(executable):
        sys.exit(f"scripts/tpu_compile: {name}: it waits for {exchanges}")
    return found


def main(folder: pathlib.Path) -> None:
    """Compiles everything."""
    manifest = json.loads((folder / "manifest.json").read_text())
    results = {}
    for program in manifest["programs"]:
        found = compile_program(folder, program)
        if found and "SparseCores" in program["name"]:
            results[program["topology"]] = found
    for topology, found in results.items():
        if not found["sparsecore_instructions"]:
            sys.exit(
                f"scripts/tpu_compile: {topology}: nothing is left to the "
                "SparseCores."
            )
    (folder / "result.json").write_text(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
