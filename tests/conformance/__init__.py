"""One registry of cases, run on every backend and compared with NumPy."""
