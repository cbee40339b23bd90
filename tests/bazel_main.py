"""What Bazel starts for each test of BUILD: pytest on the files it is given."""

import sys

import pytest

if __name__ == "__main__":
    # The files lie in a read-only tree.
    sys.exit(pytest.main(["-p", "no:cacheprovider", *sys.argv[1:]]))
