"""What every test shares. It runs before TensorFlow starts."""

from __future__ import annotations

import os

# TensorFlow reads it at import; its C++ log would bury what tests print.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import hypothesis
import keras
import pytest
import tensorflow as tf

from tests import data_autotuning

#: Logical devices, for strategies of several replicas on one CPU.
LOGICAL_CPUS = 4

tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0],
    [tf.config.LogicalDeviceConfiguration()] * LOGICAL_CPUS,
)

data_autotuning.turn_off()

# The same examples in every run; `--hypothesis-profile=explore` draws others.
hypothesis.settings.register_profile(
    "repeatable", derandomize=True, deadline=None, database=None
)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _random_seed() -> None:
    keras.utils.set_random_seed(20240229)


@pytest.fixture(scope="session")
def mirrored() -> tf.distribute.Strategy:
    """Two replicas on logical CPUs.

    One a process: the collectives of two of them wait for each other. An
    error in one replica can abort later collectives, so error cases run in a
    process of their own.
    """
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
