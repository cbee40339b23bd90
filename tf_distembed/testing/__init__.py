"""Testing SparseCore code without a TPU."""

from tf_distembed.testing.emulator import (
    emulator_active,
    prepare,
    sparsecore_emulator,
)

__all__ = ["emulator_active", "prepare", "sparsecore_emulator"]
