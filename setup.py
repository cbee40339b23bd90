"""Package metadata of tf_distembed.

TensorFlow is an extra, not a requirement: `tensorflow`, `tensorflow-cpu` and
`tensorflow-tpu` all install the module `tensorflow`, and pip puts two of them
over each other without a word. A requirement on any one of them would break
the machines that need another.
"""

from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent

LINUX_X86 = 'sys_platform == "linux" and platform_machine == "x86_64"'
NOT_LINUX_X86 = 'sys_platform != "linux" or platform_machine != "x86_64"'

EXTRAS = {
    "cpu": [
        f"tensorflow-cpu>=2.20,<2.22; {LINUX_X86}",
        f"tensorflow>=2.20,<2.22; {NOT_LINUX_X86}",
    ],
    "gpu": ["tensorflow[and-cuda]>=2.20,<2.22"],
    # libtpu: later ones dropped a symbol that TensorFlow 2.20 asks for, and
    # `import tensorflow` then aborts the process.
    "tpu": ["tensorflow-tpu==2.20.0", "libtpu>=0.0.14,<=0.0.30"],
    # The formatter and the type checker are bound to a minor version: a newer
    # one may refuse code that was clean when it was written.
    "test": [
        "pytest>=8",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "ruff>=0.17,<0.18",
        "mypy>=2.4,<2.5",
        # Programs for it run beside ours, to show that they are the same. It
        # requires Keras and ml-dtypes, and no TensorFlow.
        "keras-rs==0.4.0",
    ],
}

setup(
    name="tf_distembed",
    version="0.1.0",
    description=(
        "Large embedding tables for TensorFlow and Keras, with one set of "
        "rules on CPU, GPU and Cloud TPU SparseCores"
    ),
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    packages=find_packages(include=["tf_distembed", "tf_distembed.*"]),
    package_data={"tf_distembed": ["py.typed"]},
    python_requires=">=3.11",
    install_requires=["absl-py>=1.4", "keras>=3.12,!=3.15.0", "numpy>=1.26"],
    extras_require=EXTRAS,
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    zip_safe=False,
)
