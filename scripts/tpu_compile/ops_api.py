"""Lets TensorFlow lower SparseCore operations where there is no TPU library.

The kernels that turn `XlaSparseDenseMatmul...` into a TPU's program ask the
TPU's library one thing, how many SparseCores a chip has, through a table of C
function pointers. Without the library the pointer is null, and the process
dies. Here it is given a function that answers.

It relies on the layout of one wheel, tensorflow-tpu 2.20.0 started with
TPU_LOAD_LIBRARY=0, which is why it stands here and not in the package.
"""

from __future__ import annotations

import ctypes
import pathlib
import re
from typing import Any

import tensorflow as tf

_QUESTION = "TpuTopology_MaybeAvailableSparseCoresPerLogicalDevice"
# stream_executor::tpu::OpsApiFn()
_TABLE_GETTER = "_ZN15stream_executor3tpu8OpsApiFnEv"
# How absl::Status spells OK, in the one word that it takes.
_OK = 1

_answer = {"sparsecores": 0}
#: The callback must outlive every call from C++.
_kept: list[Any] = []


def entry_names(header: str) -> list[str]:
    """The entries of the table of function pointers, in their order."""
    struct = header.split("struct TfTpu_OpsApiFn", 1)[1]
    return re.findall(r"TFTPU_ADD_FN_IN_STRUCT\(\s*(\w+)\s*\)", struct)


def answer_sparsecores(per_chip: int) -> None:
    """From now on, a chip has `per_chip` SparseCores.

    Raises:
        RuntimeError: a TPU library is loaded and answers itself.
    """
    _answer["sparsecores"] = per_chip
    if _kept:
        return
    folder = pathlib.Path(tf.__file__).parent
    header = folder / "include/xla/stream_executor/tpu/tpu_ops_c_api.h"
    names = entry_names(header.read_text())
    library = ctypes.CDLL(str(folder / "libtensorflow_cc.so.2"))
    getter = getattr(library, _TABLE_GETTER)
    getter.restype = ctypes.c_void_p
    table = (ctypes.c_void_p * len(names)).from_address(getter())
    place = names.index(_QUESTION)
    if table[place]:
        raise RuntimeError(
            "A TPU library is loaded. Start Python with TPU_LOAD_LIBRARY=0."
        )
    _kept.append(_callback)
    table[place] = ctypes.cast(_callback, ctypes.c_void_p).value


# absl::StatusOr<int> is returned through a hidden first argument: the status,
# then the number.
@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int)
def _callback(result: int, core_type: int) -> int:
    del core_type
    ctypes.c_uint64.from_address(result).value = _OK
    ctypes.c_int32.from_address(result + 8).value = _answer["sparsecores"]
    return result
