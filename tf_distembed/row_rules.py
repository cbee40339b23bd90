"""The formula of each row optimizer, on the touched rows alone.

A rule is pure arithmetic: it receives the rows `[U, D]`, the summed gradient
of each, the slots of the same rows, the step count and the learning rate, and
returns the new rows and slots. Where rows live, how repeated ids are summed
and where the slots are kept is nobody's business here.

The rules named after Keras optimizers are Keras' own formulas; those named
`Tpu...` are the formulas of `tf.tpu.experimental.embedding`, as
`TPUEmbeddingV2` runs them.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import ClassVar

import tensorflow as tf

Slots = dict[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class RowRule(abc.ABC):
    """One optimizer's settings and its update of touched rows.

    Two tables may share a stack only if their rules compare equal.
    """

    #: What an error message calls this optimizer.
    title: ClassVar[str]

    @property
    def slots(self) -> dict[str, float]:
        """Slot name, as Keras names it -> the value each entry starts at."""
        return {}

    @abc.abstractmethod
    def update(
        self,
        rows: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        """One optimizer step.

        Args:
            rows: `[U, D]`, the touched rows.
            gradient: `[U, D]`, summed over all uses of each row.
            slots: slot name -> `[U, D]`.
            step: scalar integer, 1 at the first step.
            learning_rate: scalar of the rows' dtype.

        Returns:
            The new rows and the new slots, of the same shapes.
        """


@dataclasses.dataclass(frozen=True)
class Sgd(RowRule):
    """`w -= lr g`; with momentum Keras' velocity form, lazily.

    `m = momentum m - lr g`; `w += m`, or `w += momentum m - lr g` (nesterov).
    """

    momentum: float = 0.0
    nesterov: bool = False
    title: ClassVar[str] = "SGD"

    @property
    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def update(
        self,
        rows: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        move = learning_rate * gradient
        if not self.momentum:
            return rows - move, {}
        velocity = self.momentum * slots["momentum"] - move
        if self.nesterov:
            new = rows + self.momentum * velocity - move
        else:
            new = rows + velocity
        return new, {"momentum": velocity}


@dataclasses.dataclass(frozen=True)
class Adagrad(RowRule):
    """`a += g^2`; `w -= lr g / sqrt(a + epsilon)`."""

    initial_accumulator_value: float = 0.1
    epsilon: float = 1e-7
    title: ClassVar[str] = "Adagrad"

    @property
    def slots(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def update(
        self,
        rows: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        total = slots["accumulator"] + tf.square(gradient)
        move = learning_rate * gradient / tf.sqrt(total + self.epsilon)
        return rows - move, {"accumulator": total}


def _moments(
    rule: Adam | TpuAdam, gradient: tf.Tensor, slots: Slots
) -> tuple[tf.Tensor, tf.Tensor]:
    """Adam's two running means, in Keras' form `m += (g - m)(1 - beta)`."""
    momentum, velocity = slots["momentum"], slots["velocity"]
    momentum += (gradient - momentum) * (1.0 - rule.beta_1)
    velocity += (tf.square(gradient) - velocity) * (1.0 - rule.beta_2)
    return momentum, velocity


@dataclasses.dataclass(frozen=True)
class Adam(RowRule):
    """Adam with the bias correction and epsilon where Keras puts them.

    `alpha = lr sqrt(1 - beta_2^t) / (1 - beta_1^t)`;
    `w -= alpha m / (sqrt(v) + epsilon)`.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    title: ClassVar[str] = "Adam"

    @property
    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0, "velocity": 0.0}

    def update(
        self,
        rows: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        alpha = learning_rate * self.correction(step, rows.dtype)
        momentum, velocity = _moments(self, gradient, slots)
        move = alpha * momentum / (tf.sqrt(velocity) + self.epsilon)
        return rows - move, {"momentum": momentum, "velocity": velocity}

    def correction(self, step: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
        """`sqrt(1 - beta_2^t) / (1 - beta_1^t)`, a scalar of `dtype`."""
        # At least float32: bfloat16 does not hold 1 - 0.999.
        wide = tf.float64 if dtype == tf.float64 else tf.float32
        t = tf.cast(step, wide)
        beta_1, beta_2 = (
            tf.constant(beta, wide) for beta in (self.beta_1, self.beta_2)
        )
        factor = tf.sqrt(1.0 - beta_2**t) / (1.0 - beta_1**t)
        return tf.cast(factor, dtype)


@dataclasses.dataclass(frozen=True)
class Ftrl(RowRule):
    """FTRL-proximal as Keras writes it.

    Reference: McMahan et al., "Ad Click Prediction: a View from the Trenches"
    (2013), Algorithm 1, with Keras' `beta` and shrinkage.
    """

    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    l2_shrinkage_regularization_strength: float = 0.0
    beta: float = 0.0
    title: ClassVar[str] = "FTRL"

    @property
    def slots(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator_value, "linear": 0.0}

    def update(
        self,
        rows: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        power, old = -self.learning_rate_power, slots["accumulator"]
        shrunk = gradient
        if self.l2_shrinkage_regularization_strength:
            shrunk += 2.0 * self.l2_shrinkage_regularization_strength * rows
        total = old + tf.square(gradient)
        raised = tf.pow(total, power)
        growth = (raised - tf.pow(old, power)) / learning_rate
        linear = slots["linear"] + shrunk - growth * rows
        l2 = self.l2_regularization_strength + self.beta / (2.0 * learning_rate)
        quadratic = raised / learning_rate + 2.0 * l2
        l1 = self.l1_regularization_strength
        # Of a row with an accumulator of 0 and gradients of 0, both are 0.
        new = tf.math.divide_no_nan(
            tf.clip_by_value(linear, -l1, l1) - linear, quadratic
        )
        return new, {"accumulator": total, "linear": linear}


@dataclasses.dataclass(frozen=True)
class TpuAdagrad(RowRule):
    """`a += g^2`; `w -= lr g / sqrt(a)`: no epsilon."""

    initial_accumulator_value: float = 0.1
    title: ClassVar[str] = "tf.tpu Adagrad"

    @property
    def slots(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator_value}

    def update(
        self,
        rows: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        total = slots["accumulator"] + tf.square(gradient)
        # A row whose gradients were all zero has an accumulator of 0.
        move = tf.math.divide_no_nan(learning_rate * gradient, tf.sqrt(total))
        return rows - move, {"accumulator": total}


@dataclasses.dataclass(frozen=True)
class TpuAdagradMomentum(RowRule):
    """Adagrad scaling, then momentum over the scaled gradients.

    `a = a + g^2` (`beta2 == 1`) or `a = beta2 a + (1 - beta2) g^2`;
    `s = g (a + epsilon)^(-1 / exponent)`; `m = momentum m + s`;
    `w -= lr m`, or `w -= lr (momentum m + s)` with nesterov.
    """

    momentum: float = 0.0
    use_nesterov: bool = False
    exponent: float = 2.0
    beta2: float = 1.0
    epsilon: float = 1e-10
    title: ClassVar[str] = "tf.tpu AdagradMomentum"

    @property
    def slots(self) -> dict[str, float]:
        return {"accumulator": 0.0, "momentum": 0.0}

    def update(
        self,
        rows: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        total, squared = slots["accumulator"], tf.square(gradient)
        if self.beta2 == 1.0:
            total += squared
        else:
            total = self.beta2 * total + (1.0 - self.beta2) * squared
        scaled = gradient * tf.pow(total + self.epsilon, -1.0 / self.exponent)
        momentum = self.momentum * slots["momentum"] + scaled
        move = momentum
        if self.use_nesterov:
            move = self.momentum * momentum + scaled
        new = {"accumulator": total, "momentum": momentum}
        return rows - learning_rate * move, new


@dataclasses.dataclass(frozen=True)
class TpuAdam(RowRule):
    """Adam without bias correction.

    `w -= lr m / (sqrt(v) + epsilon)`, or `w -= lr m / sqrt(v + epsilon^2)`
    with `sum_inside_sqrt`.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    sum_inside_sqrt: bool = True
    title: ClassVar[str] = "tf.tpu Adam"

    @property
    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0, "velocity": 0.0}

    def update(
        self,
        rows: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        momentum, velocity = _moments(self, gradient, slots)
        if self.sum_inside_sqrt:
            size = tf.sqrt(velocity + self.epsilon**2)
        else:
            size = tf.sqrt(velocity) + self.epsilon
        new = {"momentum": momentum, "velocity": velocity}
        return rows - learning_rate * momentum / size, new


@dataclasses.dataclass(frozen=True)
class TpuFtrl(RowRule):
    """FTRL as `TPUEmbeddingV2` lowers it.

    It differs from Keras' only in `beta`, which is added to the root of the
    accumulator before the division by the learning rate (for a
    `learning_rate_power` of -0.5 the two agree), and has no shrinkage.
    """

    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1_regularization_strength: float = 0.0
    l2_regularization_strength: float = 0.0
    beta: float = 0.0
    multiply_linear_by_learning_rate: bool = False
    title: ClassVar[str] = "tf.tpu FTRL"

    @property
    def slots(self) -> dict[str, float]:
        return {"accumulator": self.initial_accumulator_value, "linear": 0.0}

    def update(
        self,
        rows: tf.Tensor,
        gradient: tf.Tensor,
        slots: Slots,
        step: tf.Tensor,
        learning_rate: tf.Tensor,
    ) -> tuple[tf.Tensor, Slots]:
        power, old = -self.learning_rate_power, slots["accumulator"]
        total = old + tf.square(gradient)
        raised = tf.pow(total, power)
        scale = tf.ones_like(learning_rate)
        if self.multiply_linear_by_learning_rate:
            scale = learning_rate
        growth = (raised - tf.pow(old, power)) * scale / learning_rate
        linear = slots["linear"] + scale * gradient - growth * rows
        l1 = self.l1_regularization_strength * scale
        l2 = self.l2_regularization_strength * scale
        quadratic = (raised + self.beta) * scale / learning_rate + 2.0 * l2
        new = (tf.clip_by_value(linear, -l1, l1) - linear) / quadratic
        return new, {"accumulator": total, "linear": linear}
