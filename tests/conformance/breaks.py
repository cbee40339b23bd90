"""The rules, each broken in the reference, by the name of what is wrong."""

from __future__ import annotations

import dataclasses

import numpy as np

from tests.conformance.reference import Reference

BREAKS: dict[str, type[Reference]] = {}


def breaks(name: str):
    """Registers a broken reference under what is wrong with it."""

    def register(broken: type[Reference]) -> type[Reference]:
        BREAKS[name] = broken
        return broken

    return register


def replaced(use, **changes):
    return dataclasses.replace(use, **changes)


# -- Ids ---------------------------------------------------------------------


@breaks("ids are clamped")
class _(Reference):
    def valid(self, table, bag):
        last = table.vocabulary - 1
        return [replaced(u, id=min(max(u.id, 0), last)) for u in bag]


@breaks("ids wrap")
class _(Reference):
    def valid(self, table, bag):
        return [replaced(u, id=u.id % table.vocabulary) for u in bag]


@breaks("ids are narrowed before the check")
class _(Reference):
    def valid(self, table, bag):
        def narrow(i):
            return (i + 2**31) % 2**32 - 2**31

        bag = [replaced(u, id=narrow(u.id)) for u in bag]
        return super().valid(table, bag)


@breaks("a dropped id counts in the denominator")
class _(Reference):
    """It reads a row of zeros that stands after the table."""

    def valid(self, table, bag):
        n = table.vocabulary
        return [u if 0 <= u.id < n else replaced(u, id=n) for u in bag]

    def look_up(self, feature, table, values, step, batch):
        values = np.vstack([values, np.zeros((1, table.dim))])
        output, rows, weights = super().look_up(
            feature, table, values, step, batch
        )
        return (
            output,
            [row for row in rows if row.use.id < table.vocabulary],
            weights,
        )


@breaks("weights are not dropped alongside")
class _(Reference):
    def valid(self, table, bag):
        return [
            replaced(kept, weight=fed.weight, index=fed.index)
            for kept, fed in zip(super().valid(table, bag), bag, strict=False)
        ]


@breaks("dropped ids touch a row")
class _(Reference):
    def valid(self, table, bag):
        valid = super().valid(table, bag)
        return [u if u in valid else replaced(u, id=0, weight=0.0) for u in bag]


# -- Kinds and shapes --------------------------------------------------------


@breaks("sparse ids in the order fed")
class _(Reference):
    def in_order(self, feature, uses):
        return list(uses)


@breaks("the last id of a cell wins")
class _(Reference):
    def in_order(self, feature, uses):
        uses = super().in_order(feature, uses)
        return list({(u.row, u.column): u for u in uses}.values())


@breaks("bags are not cut")
class _(Reference):
    def cut(self, feature, bag):
        return bag


@breaks("the cut comes before the drop")
class _(Reference):
    def taking_part(self, feature, table, bag):
        return self.valid(table, self.cut(feature, bag))

    def cut(self, feature, bag):
        if feature.positions is not None:
            return bag[: feature.positions]
        return super().cut(feature, bag)


@breaks("bags are cut by the sparse column")
class _(Reference):
    def cut(self, feature, bag):
        if feature.width is None or feature.kind != "sparse":
            return super().cut(feature, bag)
        return [u for u in bag if u.column < feature.width]


@breaks("bags are cut after the denominator")
class _(Reference):
    def cut(self, feature, bag):
        return bag

    def groups(self, feature, bag):
        self.width = feature.width if feature.positions is None else None
        return super().groups(feature, bag)

    def gains(self, weights, combiner):
        gains = super().gains(weights, combiner)
        gains[self.width :] = 0.0 if self.width is not None else gains[0:0]
        return gains


@breaks("weights are not cut alongside")
class _(Reference):
    def cut(self, feature, bag):
        kept = super().cut(feature, bag)
        last = bag[len(bag) - len(kept) :]
        return [
            replaced(u, weight=other.weight)
            for u, other in zip(kept, last, strict=True)
        ]


@breaks("ids beyond the cut touch rows")
class _(Reference):
    """They take part with a gain of zero."""

    def cut(self, feature, bag):
        width = feature.width or feature.positions or len(bag)
        return bag[:width] + [replaced(u, weight=0.0) for u in bag[width:]]

    def groups(self, feature, bag):
        if feature.positions is None:
            return super().groups(feature, bag)
        last = feature.positions - 1
        # The last group of a place decides what stands there.
        return [((min(i, last),), [u]) for i, u in enumerate(bag)][::-1]


@breaks("gaps stay")
class _(Reference):
    def groups(self, feature, bag):
        if feature.positions is None:
            return super().groups(feature, bag)
        return [((u.column,), [u]) for u in bag if u.column < feature.positions]


# -- Combiners and weights ---------------------------------------------------


@breaks("weights of none are zero")
class _(Reference):
    def look_up(self, feature, table, values, step, batch):
        if feature.weights is None:
            values = np.zeros_like(values)
        return super().look_up(feature, table, values, step, batch)


@breaks("weights are ignored")
class _(Reference):
    def gains(self, weights, combiner):
        return super().gains(np.ones_like(weights), combiner)


@breaks("negative weights are clamped")
class _(Reference):
    def gains(self, weights, combiner):
        return super().gains(np.maximum(weights, 0), combiner)


class _Denominator(Reference):
    """Another denominator for one combiner."""

    combiner: str

    def other(self, weights):
        raise NotImplementedError

    def denominator(self, weights, combiner):
        if combiner == self.combiner:
            return self.other(weights)
        return super().denominator(weights, combiner)


@breaks("mean over the count")
class _(_Denominator):
    combiner = "mean"

    def other(self, weights):
        return len(weights)


@breaks("mean over absolute weights")
class _(_Denominator):
    combiner = "mean"

    def other(self, weights):
        return np.abs(weights).sum()


@breaks("sqrtn over the root of the count")
class _(_Denominator):
    combiner = "sqrtn"

    def other(self, weights):
        return np.sqrt(len(weights))


@breaks("sqrtn over the root of the sum")
class _(_Denominator):
    combiner = "sqrtn"

    def other(self, weights):
        return np.sqrt(np.abs(weights.sum()))


@breaks("a zero denominator leaves the sum")
class _(Reference):
    def gains_without_denominator(self, weights):
        return weights


@breaks("a bag of one is its row")
class _(Reference):
    def gains(self, weights, combiner):
        if len(weights) == 1:
            return np.ones_like(weights)
        return super().gains(weights, combiner)


@breaks("a bag of one is weighted")
class _(Reference):
    def gains(self, weights, combiner):
        return (
            weights if len(weights) == 1 else super().gains(weights, combiner)
        )


@breaks("no gradient through the denominator")
class _(Reference):
    def weights_gradient(self, weights, rows, gradient, combiner):
        size = self.denominator(weights, combiner)
        return rows @ gradient / size if size else np.zeros_like(weights)


@breaks("weights' gradient despite a zero denominator")
class _(Reference):
    def weights_gradient(self, weights, rows, gradient, combiner):
        if self.denominator(weights, combiner) == 0:
            return rows @ gradient
        return super().weights_gradient(weights, rows, gradient, combiner)


# -- Empty -------------------------------------------------------------------


@breaks("an empty row reads row 0")
class _(Reference):
    def finish_output(self, feature, bags, output, values):
        for row, bag in enumerate(bags):
            if not bag:
                output[row] = values[0]
        return output


@breaks("an empty last row is not there")
class _(Reference):
    def finish_output(self, feature, bags, output, values):
        while bags and not bags[-1]:
            bags = bags[:-1]
        return output[: len(bags)]


# -- Updates -----------------------------------------------------------------


def grouped(items, key):
    groups = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return list(groups.values())


@breaks("one step an occurrence")
class _(Reference):
    def contributions(self, uses, batch):
        return [[use] for use in uses]


@breaks("one step a bag")
class _(Reference):
    def contributions(self, uses, batch):
        return grouped(uses, lambda u: (u.feature.name, u.use.row))


@breaks("one step a feature")
class _(Reference):
    def contributions(self, uses, batch):
        return grouped(uses, lambda u: u.feature.name)


@breaks("one step a replica")
class _(Reference):
    def contributions(self, uses, batch):
        return grouped(uses, lambda u: u.use.row < batch // 2)


@breaks("all rows are touched")
class _(Reference):
    def touched(self, table, uses):
        return list(range(table.vocabulary))


@breaks("weight 0 does not touch")
class _(Reference):
    def touched(self, table, uses):
        return sorted({u.use.id for u in uses if u.use.weight != 0})


@breaks("gradient 0 does not touch")
class _(Reference):
    def touched(self, table, uses):
        return sorted({u.use.id for u in uses if u.gradient.any()})


@breaks("features without gradient do not touch")
class _(Reference):
    def touched(self, table, uses):
        return sorted({u.use.id for u in uses if u.feature.in_loss})


@breaks("t counts the steps with an id of the table")
class _(Reference):
    def step_count(self, step, seen):
        return seen


@breaks("t counts the steps with a gradient of the table")
class _(Reference):
    def look_up(self, *args):
        output, rows, weights = super().look_up(*args)
        return output, [u for u in rows if u.feature.in_loss], weights

    def step_count(self, step, seen):
        return seen


@breaks("frozen tables train")
class _(Reference):
    def trains(self, table):
        return True


@breaks("the rate is ignored")
class _(Reference):
    def learning_rate(self, settings, t):
        return 1.0


@breaks("the schedule stands still")
class _(Reference):
    def learning_rate(self, settings, t):
        return super().learning_rate(settings, 1)


@breaks("the schedule starts at 1")
class _(Reference):
    def learning_rate(self, settings, t):
        return super().learning_rate(settings, t + 1)


# -- Optimizers --------------------------------------------------------------


def without_corrections(self, w, slots, g, t, lr, **settings):
    settings.setdefault("sum_inside_sqrt", False)
    return Reference.native_adam(self, w, slots, g, t, lr, **settings)


@breaks("no bias correction")
class _(Reference):
    adam = without_corrections


@breaks("Adam's epsilon inside")
class _(Reference):
    """Epsilon joins the corrected root, as in the paper."""

    def adam(self, w, slots, g, t, lr, beta_1, beta_2, epsilon):
        _, new = super().adam(w, slots, g, t, lr, beta_1, beta_2, epsilon)
        m = new["momentum"] / (1 - beta_1**t)
        v = new["velocity"] / (1 - beta_2**t)
        return w - lr * m / (np.sqrt(v) + epsilon), new


@breaks("native Adam corrects the bias")
class _(Reference):
    def native_adam(self, w, slots, g, t, lr, **settings):
        rate = lr * np.sqrt(1 - settings["beta_2"] ** t)
        rate /= 1 - settings["beta_1"] ** t
        return super().native_adam(w, slots, g, t, rate, **settings)


@breaks("the sum is outside")
class _(Reference):
    def native_adam(self, *args, sum_inside_sqrt, **settings):
        return super().native_adam(*args, sum_inside_sqrt=False, **settings)


@breaks("the sum is inside")
class _(Reference):
    def native_adam(self, *args, sum_inside_sqrt, **settings):
        return super().native_adam(*args, sum_inside_sqrt=True, **settings)


@breaks("Adagrad's epsilon outside")
class _(Reference):
    def adagrad(self, w, slots, g, t, lr, epsilon):
        a = slots["accumulator"] + g**2
        return w - lr * g / (np.sqrt(a) + epsilon), {"accumulator": a}


@breaks("momentum holds the bare gradient")
class _(Reference):
    def momentum(self, w, slots, g, t, lr, momentum, nesterov=False):
        m = momentum * slots["momentum"] + g
        return w - lr * (momentum * m + g if nesterov else m), {"momentum": m}


@breaks("nesterov is plain momentum")
class _(Reference):
    def momentum(self, *args, nesterov=False, **settings):
        return super().momentum(*args, **settings)


def ftrl_with(**changes) -> type[Reference]:
    class Changed(Reference):
        def ftrl(self, *args, **settings):
            return super().ftrl(*args, **{**settings, **changes})

        def native_ftrl(self, *args, **settings):
            used = {k: v for k, v in changes.items() if k in settings}
            return super().native_ftrl(*args, **{**settings, **used})

    return Changed


breaks("FTRL without l1")(ftrl_with(l1_regularization_strength=0.0))
breaks("FTRL without l2")(ftrl_with(l2_regularization_strength=0.0))
breaks("FTRL without beta")(ftrl_with(beta=0.0))
breaks("FTRL without shrinkage")(
    ftrl_with(l2_shrinkage_regularization_strength=0.0)
)
breaks("FTRL's power is a half")(ftrl_with(learning_rate_power=-0.5))
breaks("FTRL's linear slot is not scaled")(
    ftrl_with(multiply_linear_by_learning_rate=False)
)


def adagrad_momentum_with(**changes) -> type[Reference]:
    class Changed(Reference):
        def native_adagrad_momentum(self, *args, **settings):
            return super().native_adagrad_momentum(
                *args, **{**settings, **changes}
            )

    return Changed


breaks("AdagradMomentum without beta2")(adagrad_momentum_with(beta2=1.0))
breaks("AdagradMomentum without nesterov")(
    adagrad_momentum_with(use_nesterov=False)
)
breaks("AdagradMomentum's exponent is two")(adagrad_momentum_with(exponent=2.0))
breaks("AdagradMomentum without epsilon")(adagrad_momentum_with(epsilon=1e-9))
