"""The optimizers of the tables, as data."""

from __future__ import annotations

from tests.conformance.cases import Optimizer

_ADAM = {"learning_rate": 0.25, "beta_1": 0.75, "beta_2": 0.875}
_FTRL = {
    "learning_rate": 0.5,
    "learning_rate_power": -0.5,
    "l1_regularization_strength": 0.25,
    "l2_regularization_strength": 0.125,
    "beta": 0.25,
}
_FTRL_SLOTS = {"accumulator": 0.25, "linear": 0.0}
_ADAM_SLOTS = {"momentum": 0.0, "velocity": 0.0}

OPTIMIZERS = {
    "sgd": Optimizer("sgd", "keras", {"learning_rate": 0.5}),
    "sgd by name": Optimizer("sgd", "name", {"learning_rate": 0.01}),
    "sgd with a schedule": Optimizer(
        "sgd",
        "keras",
        {
            "learning_rate": {
                "initial_learning_rate": 0.5,
                "decay_steps": 1,
                "decay_rate": 0.5,
            }
        },
    ),
    "adagrad": Optimizer(
        "adagrad",
        "keras",
        {"learning_rate": 0.5, "epsilon": 0.0625},
        {"accumulator": 0.25},
    ),
    "adagrad by name": Optimizer(
        "adagrad",
        "name",
        {"learning_rate": 0.001, "epsilon": 1e-7},
        {"accumulator": 0.1},
    ),
    "adam": Optimizer(
        "adam", "keras", {**_ADAM, "epsilon": 0.0625}, _ADAM_SLOTS
    ),
    "adam with a schedule": Optimizer(
        "adam",
        "keras",
        {
            **_ADAM,
            "epsilon": 0.0625,
            "learning_rate": {
                "initial_learning_rate": 0.25,
                "decay_steps": 2,
                "decay_rate": 0.5,
            },
        },
        _ADAM_SLOTS,
    ),
    "adam by name": Optimizer(
        "adam",
        "name",
        {
            "learning_rate": 0.001,
            "beta_1": 0.9,
            "beta_2": 0.999,
            "epsilon": 1e-7,
        },
        _ADAM_SLOTS,
    ),
    "momentum": Optimizer(
        "momentum",
        "keras",
        {"learning_rate": 0.25, "momentum": 0.75},
        {"momentum": 0.0},
    ),
    "nesterov": Optimizer(
        "momentum",
        "keras",
        {"learning_rate": 0.25, "momentum": 0.75, "nesterov": True},
        {"momentum": 0.0},
    ),
    "ftrl": Optimizer(
        "ftrl",
        "keras",
        {**_FTRL, "l2_shrinkage_regularization_strength": 0.0},
        _FTRL_SLOTS,
    ),
    "ftrl with shrinkage": Optimizer(
        "ftrl",
        "keras",
        {
            **_FTRL,
            "learning_rate_power": -0.75,
            "l2_shrinkage_regularization_strength": 0.0625,
        },
        _FTRL_SLOTS,
    ),
    "native sgd": Optimizer("sgd", "native", {"learning_rate": 0.5}),
    "native adagrad": Optimizer(
        "native_adagrad",
        "native",
        {"learning_rate": 0.5},
        {"accumulator": 0.25},
    ),
    "native adagrad momentum": Optimizer(
        "native_adagrad_momentum",
        "native",
        {
            "learning_rate": 0.25,
            "momentum": 0.75,
            "use_nesterov": False,
            "exponent": 2.0,
            "beta2": 0.875,
            "epsilon": 0.0625,
        },
        {"accumulator": 0.0, "momentum": 0.0},
    ),
    "native adagrad nesterov": Optimizer(
        "native_adagrad_momentum",
        "native",
        {
            "learning_rate": 0.25,
            "momentum": 0.75,
            "use_nesterov": True,
            "exponent": 3.0,
            "beta2": 1.0,
            "epsilon": 0.0625,
        },
        {"accumulator": 0.0, "momentum": 0.0},
    ),
    "native adam": Optimizer(
        "native_adam",
        "native",
        {**_ADAM, "epsilon": 0.25, "sum_inside_sqrt": True},
        _ADAM_SLOTS,
    ),
    "native adam, sum outside": Optimizer(
        "native_adam",
        "native",
        {**_ADAM, "epsilon": 0.25, "sum_inside_sqrt": False},
        _ADAM_SLOTS,
    ),
    "native ftrl": Optimizer(
        "native_ftrl",
        "native",
        {**_FTRL, "multiply_linear_by_learning_rate": False},
        _FTRL_SLOTS,
    ),
    "native ftrl, scaled": Optimizer(
        "native_ftrl",
        "native",
        {**_FTRL, "multiply_linear_by_learning_rate": True},
        _FTRL_SLOTS,
    ),
    "model": Optimizer(
        "adagrad",
        "model",
        {"learning_rate": 0.5, "epsilon": 0.0625},
        {"accumulator": 0.25},
    ),
}

#: The names that become strings, written as a user might write them.
NAMES = {
    "sgd by name": "SGD",
    "adagrad by name": "adagrad",
    "adam by name": "Adam",
}
