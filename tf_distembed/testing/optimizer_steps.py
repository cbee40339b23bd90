"""The optimizer steps of the SparseCore, on the rows that were looked up.

Each is what TensorFlow's own lowering of the SparseCore operation computes;
tests/testing/data/ holds values taken from that lowering. g is the summed
gradient of a row, w the row, lr the learning rate; slots are named as in
`tf.tpu.experimental.embedding`.
"""

import dataclasses
from collections.abc import Callable

import tensorflow as tf

Rows = list[tf.Tensor]


@dataclasses.dataclass(frozen=True)
class Step:
    """One optimizer.

    Attributes:
        function: `(gradient, [rows, slot rows...], learning rate,
            **settings)` -> the rows and slot rows after the step.
        slots: The operation's inputs that hold the slots, in order.
        settings: The operation's attributes that hold the settings.
    """

    function: Callable[..., Rows]
    slots: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()


def sgd(g: tf.Tensor, state: Rows, lr: tf.Tensor) -> Rows:
    """w - lr g."""
    (w,) = state
    return [w - lr * g]


def adagrad(g: tf.Tensor, state: Rows, lr: tf.Tensor) -> Rows:
    """a + g^2; w - lr g / sqrt(a)."""
    w, a = state
    a = a + g * g
    return [w - lr * g * tf.math.rsqrt(a), a]


def adagrad_momentum(
    g: tf.Tensor,
    state: Rows,
    lr: tf.Tensor,
    *,
    use_nesterov: bool,
    exponent: float,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> Rows:
    """s = g (a + epsilon)^(-1/exponent); m = beta1 m + s; w - lr m.

    a sums g^2 where beta2 is 1, and else is their moving average. Nesterov
    steps by beta1 m + s.
    """
    w, a, m = state
    a = a + g * g if beta2 == 1.0 else beta2 * a + (1.0 - beta2) * g * g
    scaled = g * tf.pow(a + epsilon, -1.0 / exponent)
    m = beta1 * m + scaled
    return [w - lr * (beta1 * m + scaled if use_nesterov else m), a, m]


def adam(
    g: tf.Tensor,
    state: Rows,
    lr: tf.Tensor,
    *,
    use_sum_inside_sqrt: bool,
    beta1: float,
    beta2: float,
    epsilon: float,
) -> Rows:
    """m and v are the moving averages of g and g^2; no bias correction.

    w - lr m / (sqrt(v) + epsilon), or w - lr m / sqrt(v + epsilon^2) with
    `use_sum_inside_sqrt`.
    """
    w, m, v = state
    m = beta1 * m + (1.0 - beta1) * g
    v = beta2 * v + (1.0 - beta2) * g * g
    if use_sum_inside_sqrt:
        root = tf.sqrt(v + epsilon**2)
    else:
        root = tf.sqrt(v) + epsilon
    return [w - lr * m / root, m, v]


def ftrl(
    g: tf.Tensor,
    state: Rows,
    lr: tf.Tensor,
    *,
    multiply_linear_by_learning_rate: bool,
    beta: float,
    learning_rate_power: float,
    l1_regularization_strength: float,
    l2_regularization_strength: float,
) -> Rows:
    """Follow the regularized leader, with p(a) = a^(-learning_rate_power).

    a + g^2; l + g - w (p(a) - p(a_before)) / lr, and from it

        w = (clip(l, -l1, l1) - l) / ((p(a) + beta) / lr + 2 l2)

    `multiply_linear_by_learning_rate` keeps lr l in the slot instead of l.
    """
    w, a_before, linear = state
    a = a_before + g * g
    power = tf.pow(a, -learning_rate_power)
    change = power - tf.pow(a_before, -learning_rate_power)
    scale = lr if multiply_linear_by_learning_rate else 1.0
    linear = linear + scale * g - w * change * (scale / lr)
    l1 = l1_regularization_strength * scale
    l2 = l2_regularization_strength * scale
    kept = tf.clip_by_value(linear, -l1, l1) - linear
    return [
        kept / ((power + beta) * (scale / lr) + 2.0 * l2),
        a,
        linear,
    ]


# By the part of the operation's type that names the optimizer.
STEPS = {
    "Sgd": Step(sgd),
    "Adagrad": Step(adagrad, ("accumulator",)),
    "AdagradMomentum": Step(
        adagrad_momentum,
        ("accumulator", "momenta"),
        ("use_nesterov", "exponent", "beta1", "beta2", "epsilon"),
    ),
    "Adam": Step(
        adam,
        ("momenta", "velocity"),
        ("use_sum_inside_sqrt", "beta1", "beta2", "epsilon"),
    ),
    "Ftrl": Step(
        ftrl,
        ("accumulator", "linear"),
        (
            "multiply_linear_by_learning_rate",
            "beta",
            "learning_rate_power",
            "l1_regularization_strength",
            "l2_regularization_strength",
        ),
    ),
}
