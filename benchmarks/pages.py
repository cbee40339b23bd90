"""Pages of 2 MiB for a variable, to measure what they bring.

For programs there is a way that needs no code: `docs/performance.md`.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

_HUGE_PAGE = 2 << 20
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def use_huge_pages(variable: Any) -> None:
    """Asks Linux (6.1 or newer) to put a variable's values on huge pages.

    Raises:
        OSError: if it does not.
    """
    values = np.asarray(memoryview(variable.read_value()))
    start = -(-values.ctypes.data // _HUGE_PAGE) * _HUGE_PAGE
    stop = (values.ctypes.data + values.nbytes) // _HUGE_PAGE * _HUGE_PAGE
    if stop <= start:
        return
    library = ctypes.CDLL(None, use_errno=True)
    for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE):
        failed = library.madvise(
            ctypes.c_void_p(start), ctypes.c_size_t(stop - start), advice
        )
        if failed:
            raise OSError(ctypes.get_errno(), "madvise")
