"""The rules of an embedding layer in plain NumPy, float64, one id at a time.

This is the specification as a program. It is written from the rules alone,
imports neither the package nor TensorFlow, and prefers a loop that can be
read to an array expression that is fast. Each rule is a method, so that
`breaks.py` can break one rule at a time.

One training step:

    uses of a feature ->  bags       drop ids outside the table, close the
                                     gaps, cut long bags
    bags              ->  outputs    combiner, or one row a position
    loss              ->  gradients  to each use of a row, and to the weights
    all uses of a row ->  update     summed, then one step of the optimizer
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from tests.conformance.cases import (
    Case,
    Feature,
    Optimizer,
    Table,
    Use,
    output_gradient,
)

Slots = dict[str, np.ndarray]


@dataclasses.dataclass
class Result:
    """What a run of a case gives; a backend's run has the same fields."""

    #: [step][feature] -> the layer's output.
    outputs: list[dict[str, np.ndarray]] = dataclasses.field(
        default_factory=list
    )
    #: [step][table] -> the summed gradient of the loss, [vocabulary, dim].
    table_gradients: list[dict[str, np.ndarray]] = dataclasses.field(
        default_factory=list
    )
    #: [step][feature] -> one number a fed id, in the order they were fed.
    weights_gradients: list[dict[str, np.ndarray]] = dataclasses.field(
        default_factory=list
    )
    #: After the last step: table -> values, -> slots, -> step count.
    tables: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    slots: dict[str, Slots] = dataclasses.field(default_factory=dict)
    steps: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RowGradient:
    """What one use of a row contributes to the row's gradient."""

    feature: Feature
    use: Use
    gradient: np.ndarray


class Reference:
    """The right rules. A subclass that overrides a method breaks a rule."""

    def __init__(self, optimizers: dict[str, Optimizer]):
        self.optimizers = optimizers

    # -- Bags ----------------------------------------------------------------

    def bags(
        self, feature: Feature, table: Table, step: int, batch: int
    ) -> list[list[Use]]:
        """The ids of each row of the batch that take part, in order."""
        bags: list[list[Use]] = [[] for _ in range(batch)]
        for use in self.in_order(feature, feature.uses(step)):
            bags[use.row].append(use)
        return [self.taking_part(feature, table, bag) for bag in bags]

    def in_order(self, feature: Feature, uses: Iterable[Use]) -> list[Use]:
        """Row by row and by column; ids of one cell as they appear."""
        return sorted(uses, key=lambda use: (use.row, use.column))

    def taking_part(
        self, feature: Feature, table: Table, bag: list[Use]
    ) -> list[Use]:
        """Ids outside the table are dropped first, then the bag is cut."""
        return self.cut(feature, self.valid(table, bag))

    def valid(self, table: Table, bag: list[Use]) -> list[Use]:
        """Without the ids that are no row of the table; no gap is left."""
        return [use for use in bag if 0 <= use.id < table.vocabulary]

    def cut(self, feature: Feature, bag: list[Use]) -> list[Use]:
        """The first ids, as many as were declared."""
        return bag[: feature.width] if feature.width is not None else bag

    # -- Combiners -----------------------------------------------------------

    def gains(self, weights: np.ndarray, combiner: str) -> np.ndarray:
        """c of `output = sum_i c_i e_i`."""
        denominator = self.denominator(weights, combiner)
        if denominator == 0:
            return self.gains_without_denominator(weights)
        return weights / denominator

    def denominator(self, weights: np.ndarray, combiner: str) -> float:
        """Sum: 1; mean: the sum of w; sqrtn: the root of the sum of w^2."""
        if combiner == "mean":
            return float(np.sum(weights))
        if combiner == "sqrtn":
            return float(np.sqrt(np.sum(weights**2)))
        return 1.0

    def gains_without_denominator(self, weights: np.ndarray) -> np.ndarray:
        """A zero denominator gives zeros."""
        return np.zeros_like(weights)

    def weights_gradient(
        self,
        weights: np.ndarray,
        rows: np.ndarray,
        gradient: np.ndarray,
        combiner: str,
    ) -> np.ndarray:
        """The gradient to each weight of a bag.

        With y the output and g its gradient:
            sum:   g.e_i
            mean:  g.(e_i - y) / sum(w)
            sqrtn: g.(e_i / s - y w_i / s^2),  s = sqrt(sum(w^2))
        and zero if the denominator is.
        """
        size = self.denominator(weights, combiner)
        if size == 0:
            return np.zeros_like(weights)
        along = rows @ gradient
        output = self.gains(weights, combiner) @ along
        if combiner == "mean":
            return (along - output) / size
        if combiner == "sqrtn":
            return along / size - output * weights / size**2
        return along

    # -- One feature of one step ---------------------------------------------

    def groups(
        self, feature: Feature, bag: list[Use]
    ) -> list[tuple[tuple[int, ...], list[Use]]]:
        """(Place in the row's output, uses reduced into it).

        Reduced, that is the whole bag. Unreduced, each id is a bag of one:
        ids fill the positions in order, and longer rows are cut.
        """
        if feature.positions is None:
            return [((), bag)] if bag else []
        return [((i,), [use]) for i, use in enumerate(bag[: feature.positions])]

    def look_up(
        self,
        feature: Feature,
        table: Table,
        values: np.ndarray,
        step: int,
        batch: int,
    ) -> tuple[np.ndarray, list[RowGradient], np.ndarray]:
        """Output, gradient of each use of a row, gradient of each weight."""
        upstream = output_gradient(feature, step, batch, table.dim)
        output = np.zeros_like(upstream)
        if not feature.in_loss:
            upstream = np.zeros_like(upstream)
        row_gradients = []
        weights_gradient: dict[int, float] = {}
        bags = self.bags(feature, table, step, batch)
        for row, bag in enumerate(bags):
            for place, uses in self.groups(feature, bag):
                weights = np.array([use.weight for use in uses], np.float64)
                rows = values[[use.id for use in uses]]
                gains = self.gains(weights, table.combiner)
                g = upstream[(row, *place)]
                output[(row, *place)] = gains @ rows
                row_gradients += [
                    RowGradient(feature, use, gain * g)
                    for use, gain in zip(uses, gains, strict=True)
                ]
                weights_gradient |= zip(
                    [use.index for use in uses],
                    self.weights_gradient(weights, rows, g, table.combiner),
                    strict=True,
                )
        return (
            self.finish_output(feature, bags, output, values),
            row_gradients,
            np.array(
                [
                    weights_gradient.get(use.index, 0.0)
                    for use in feature.uses(step)
                ]
            ),
        )

    def finish_output(
        self,
        feature: Feature,
        bags: list[list[Use]],
        output: np.ndarray,
        values: np.ndarray,
    ) -> np.ndarray:
        """An empty row, wherever it stands, is zeros; so it already is."""
        return output

    # -- Updates -------------------------------------------------------------

    def contributions(
        self, uses: list[RowGradient], batch: int
    ) -> list[list[RowGradient]]:
        """What is summed before an optimizer step: all uses of the step."""
        return [uses]

    def touched(self, table: Table, uses: Sequence[RowGradient]) -> list[int]:
        """The rows whose id took part, whatever its weight or gradient."""
        return sorted({use.use.id for use in uses})

    def step_count(self, step: int, seen: int) -> int:
        """T: the steps the layer has taken, of which `seen` had an id."""
        return step

    def learning_rate(self, settings: dict, t: int) -> float:
        """The rate of step t; a schedule is asked for t - 1, as by Keras."""
        rate = settings["learning_rate"]
        if isinstance(rate, dict):
            exponent = (t - 1) / rate["decay_steps"]
            rate = rate["initial_learning_rate"] * (
                rate["decay_rate"] ** exponent
            )
        return rate

    def update(
        self,
        optimizer: Optimizer,
        values: np.ndarray,
        slots: Slots,
        touched: list[int],
        gradient: np.ndarray,
        t: int,
    ) -> None:
        """One step of the table's optimizer on its touched rows, in place."""
        rate = self.learning_rate(optimizer.settings, t)
        settings = {
            k: v for k, v in optimizer.settings.items() if k != "learning_rate"
        }
        formula = getattr(self, optimizer.rule)
        new, new_slots = formula(
            values[touched],
            {name: slot[touched] for name, slot in slots.items()},
            gradient[touched],
            t,
            rate,
            **settings,
        )
        values[touched] = new
        for name, slot in new_slots.items():
            slots[name][touched] = slot

    # -- Optimizers, as Keras writes them ------------------------------------

    def sgd(self, w, slots, g, t, lr):
        return w - lr * g, {}

    def momentum(self, w, slots, g, t, lr, momentum, nesterov=False):
        m = momentum * slots["momentum"] - lr * g
        return w + (momentum * m - lr * g if nesterov else m), {"momentum": m}

    def adagrad(self, w, slots, g, t, lr, epsilon):
        a = slots["accumulator"] + g**2
        return w - lr * g / np.sqrt(a + epsilon), {"accumulator": a}

    def adam(self, w, slots, g, t, lr, beta_1, beta_2, epsilon):
        m = slots["momentum"] + (g - slots["momentum"]) * (1 - beta_1)
        v = slots["velocity"] + (g**2 - slots["velocity"]) * (1 - beta_2)
        rate = lr * np.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        return w - rate * m / (np.sqrt(v) + epsilon), {
            "momentum": m,
            "velocity": v,
        }

    def ftrl(
        self,
        w,
        slots,
        g,
        t,
        lr,
        learning_rate_power,
        l1_regularization_strength,
        l2_regularization_strength,
        l2_shrinkage_regularization_strength,
        beta,
    ):
        l1, l2 = l1_regularization_strength, l2_regularization_strength
        old, new = slots["accumulator"], slots["accumulator"] + g**2
        sigma = (new**-learning_rate_power - old**-learning_rate_power) / lr
        shrunk = g + 2 * l2_shrinkage_regularization_strength * w
        linear = slots["linear"] + shrunk - sigma * w
        quadratic = new**-learning_rate_power / lr + 2 * l2 + beta / lr
        w = (np.clip(linear, -l1, l1) - linear) / quadratic
        return w, {"accumulator": new, "linear": linear}

    # -- Optimizers of tf.tpu.experimental.embedding -------------------------

    def native_adagrad(self, w, slots, g, t, lr):
        a = slots["accumulator"] + g**2
        return w - lr * g / np.sqrt(a), {"accumulator": a}

    def native_adagrad_momentum(
        self, w, slots, g, t, lr, momentum, use_nesterov, exponent, beta2,
        epsilon,
    ):  # fmt: skip
        new = g**2 if beta2 == 1 else (1 - beta2) * g**2
        a = beta2 * slots["accumulator"] + new
        scaled = g * (a + epsilon) ** (-1 / exponent)
        m = momentum * slots["momentum"] + scaled
        move = momentum * m + scaled if use_nesterov else m
        return w - lr * move, {"accumulator": a, "momentum": m}

    def native_adam(
        self, w, slots, g, t, lr, beta_1, beta_2, epsilon, sum_inside_sqrt
    ):
        m = beta_1 * slots["momentum"] + (1 - beta_1) * g
        v = beta_2 * slots["velocity"] + (1 - beta_2) * g**2
        if sum_inside_sqrt:
            size = np.sqrt(v + epsilon**2)
        else:
            size = np.sqrt(v) + epsilon
        return w - lr * m / size, {"momentum": m, "velocity": v}

    def native_ftrl(
        self,
        w,
        slots,
        g,
        t,
        lr,
        learning_rate_power,
        l1_regularization_strength,
        l2_regularization_strength,
        beta,
        multiply_linear_by_learning_rate,
    ):
        l1, l2 = l1_regularization_strength, l2_regularization_strength
        scale = lr if multiply_linear_by_learning_rate else 1.0
        old, new = slots["accumulator"], slots["accumulator"] + g**2
        sigma = (new**-learning_rate_power - old**-learning_rate_power) / lr
        linear = slots["linear"] + scale * (g - sigma * w)
        quadratic = new**-learning_rate_power / lr + 2 * l2 + beta / lr
        l1 = l1 * scale
        w = (np.clip(linear, -l1, l1) - linear) / (scale * quadratic)
        return w, {"accumulator": new, "linear": linear}

    # -- A whole run ---------------------------------------------------------

    def trains(self, table: Table) -> bool:
        """Whether the table is updated at all."""
        return table.trainable

    def run(
        self,
        case: Case,
        default_optimizer: str,
        values: dict[str, np.ndarray] | None = None,
    ) -> Result:
        """Every step of a case.

        Args:
            case: what is fed.
            default_optimizer: for tables that name none.
            values: table name -> initial values; those of the table if None.
        """
        result = Result()
        initial = values or {t.name: t.initial_values() for t in case.tables}
        optimizers, slots = {}, {}
        for table in case.tables:
            optimizer = self.optimizers[table.optimizer or default_optimizer]
            optimizers[table.name] = optimizer
            start = np.array(initial[table.name], np.float64)
            result.tables[table.name] = start
            slots[table.name] = {
                name: np.full(start.shape, value)
                for name, value in optimizer.slots.items()
            }
            if self.trains(table) and optimizer.maker != "model":
                # What the layer shows: the state of its own optimizers.
                result.slots[table.name] = slots[table.name]
                result.steps[table.name] = 0
        seen = dict.fromkeys(result.tables, 0)

        for step, batch in enumerate(case.batches):
            uses: dict[str, list[RowGradient]] = {t: [] for t in result.tables}
            outputs, weights_gradients = {}, {}
            for feature in case.features:
                table = case.table(feature.table)
                output, row_gradients, weights_gradient = self.look_up(
                    feature, table, result.tables[table.name], step, batch
                )
                outputs[feature.name] = output
                if feature.weights_gradient:
                    weights_gradients[feature.name] = weights_gradient
                uses[table.name] += row_gradients
            result.outputs.append(outputs)
            result.weights_gradients.append(weights_gradients)
            result.table_gradients.append({})
            for table in case.tables:
                if not self.trains(table):
                    continue
                values_ = result.tables[table.name]
                seen[table.name] += bool(uses[table.name])
                t = self.step_count(step + 1, seen[table.name])
                if table.name in result.steps:
                    result.steps[table.name] = t
                summed = np.zeros_like(values_)
                for part in self.contributions(uses[table.name], batch):
                    gradient = np.zeros_like(values_)
                    for use in part:
                        gradient[use.use.id] += use.gradient
                    summed += gradient
                    self.update(
                        optimizers[table.name],
                        values_,
                        slots[table.name],
                        self.touched(table, part),
                        gradient,
                        t,
                    )
                result.table_gradients[-1][table.name] = summed
        return result
