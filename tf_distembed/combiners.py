"""Sum, mean and sqrtn: from rows to one vector a bag, and back.

With `e` the rows of a bag and `w` their weights (1 if none are given):

```
sum    Σ w·e        mean   Σ w·e / Σ w        sqrtn  Σ w·e / √(Σ w²)
```

as `tf.nn.embedding_lookup_sparse` defines them. An empty bag, and one whose
denominator is zero, give zeros with zero gradients.

The rows may be given once each (`[U, D]`) with the place of every id among
them. The gradient goes back to those same rows, summed over all places; no
variable is captured here, so no table is ever read for it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from tf_distembed import sparse_product
from tf_distembed.bags import Bags

_Map: TypeAlias = Callable[[tf.Tensor], tf.Tensor]

_FORWARD = {
    "sum": tf.raw_ops.SparseSegmentSumWithNumSegments,
    "mean": tf.raw_ops.SparseSegmentMeanWithNumSegments,
    "sqrtn": tf.raw_ops.SparseSegmentSqrtNWithNumSegments,
}
_BACKWARD = {
    "sum": tf.raw_ops.SparseSegmentSumGrad,
    "mean": tf.raw_ops.SparseSegmentMeanGrad,
    "sqrtn": tf.raw_ops.SparseSegmentSqrtNGrad,
}


@dataclasses.dataclass(frozen=True)
class _Group:
    """Features of one combiner and form, pooled by one operation."""

    combiner: str
    members: tuple[int, ...]
    bags: Bags


def pool(
    rows: tf.Tensor,
    places: Sequence[tf.Tensor],
    bags: Sequence[Bags],
    combiners: Sequence[str],
) -> list[tf.Tensor]:
    """Combines the rows of several features.

    Args:
        rows: `[U, D]`.
        places: For each feature `[N]` int32: the row of each of its ids.
        bags: For each feature its bags, of `N` ids.
        combiners: For each feature `"sum"`, `"mean"` or `"sqrtn"`.

    Returns:
        For each feature `[num_bags, D]`, of the rows' dtype.
    """
    outputs: list[Any] = [None] * len(bags)
    for group in _groups(bags, combiners):
        group_places = _concat([places[i] for i in group.members])
        pooled = _pool_group(rows, group_places, group)
        sizes = [bags[i].num_bags for i in group.members]
        for i, part in zip(group.members, _split(pooled, sizes), strict=True):
            outputs[i] = part
    return outputs


def pool_each(
    rows: Sequence[tf.Tensor],
    bags: Sequence[Bags],
    combiners: Sequence[str],
) -> list[tf.Tensor]:
    """As `pool`, of rows that were read for each id, repeated or not.

    Args:
        rows: For each feature `[N, D]`, the row of each of its ids.
        bags: For each feature its bags, of `N` ids.
        combiners: For each feature `"sum"`, `"mean"` or `"sqrtn"`.

    Returns:
        For each feature `[num_bags, D]`, of the rows' dtype.
    """
    # Feature by feature: to pool several at once, rows would be copied.
    return [
        own
        if one.one_each
        else _pool_group(
            own, tf.range(tf.size(one.bag)), _Group(combiner, (0,), one)
        )
        for own, one, combiner in zip(rows, bags, combiners, strict=True)
    ]


def _groups(bags: Sequence[Bags], combiners: Sequence[str]) -> list[_Group]:
    alike: dict[Any, list[int]] = {}
    for i, (one, combiner) in enumerate(zip(bags, combiners, strict=True)):
        masked = one.present is not None
        key = (combiner, one.weights is None, masked, one.one_each)
        alike.setdefault(key, []).append(i)
    return [
        _Group(key[0], tuple(members), _join([bags[i] for i in members]))
        for key, members in alike.items()
    ]


def _join(bags: list[Bags]) -> Bags:
    """Several features as one whose bags are those of all, one after other."""
    first = bags[0]
    if len(bags) == 1:
        return first
    shifted, total = [], 0
    for one in bags:
        shifted.append(one.bag + total)
        total += one.num_bags
    return dataclasses.replace(
        first,
        bag=tf.concat(shifted, 0),
        num_bags=total,
        weights=_concat_or_none([one.weights for one in bags]),
        present=_concat_or_none([one.present for one in bags]),
        lengths=_concat_or_none([one.lengths for one in bags]),
    )


def _pool_group(rows: tf.Tensor, places: tf.Tensor, group: _Group) -> tf.Tensor:
    bags = group.bags
    if bags.present is not None:
        return _pool_masked(rows, places, bags, group.combiner)
    if bags.one_each:
        return _pick(rows, places)
    if bags.weights is None:
        return _pool_unweighted(rows, places, bags, group.combiner)
    weights = tf.cast(bags.weights, rows.dtype)
    gains = _gains(weights, bags.bag, bags.num_bags, group.combiner)
    return _pool_weighted(rows, places, gains, bags)


def _pick(rows: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    @tf.custom_gradient
    def pick(rows: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tf.Tensor:
            count = tf.shape(rows)[0]
            if not sparse_product.is_fast(rows.dtype):
                return tf.math.unsorted_segment_sum(upstream, places, count)
            return sparse_product.weighted_sums(
                upstream,
                tf.range(tf.size(places)),
                places,
                tf.ones_like(places, rows.dtype),
                count,
            )

        return tf.gather(rows, places), gradient

    return pick(rows)


def _pool_unweighted(
    rows: tf.Tensor, places: tf.Tensor, bags: Bags, combiner: str
) -> tf.Tensor:
    count = tf.shape(rows)[0]

    def to_bags(rows: tf.Tensor) -> tf.Tensor:
        return _FORWARD[combiner](
            data=rows,
            indices=places,
            segment_ids=bags.bag,
            num_segments=bags.num_bags,
        )

    def to_rows(upstream: tf.Tensor) -> tf.Tensor:
        if sparse_product.is_fast(rows.dtype):
            ones = tf.ones_like(bags.bag, rows.dtype)
            return sparse_product.weighted_sums(
                _scaled(upstream, ones, bags, combiner),
                bags.bag,
                places,
                ones,
                count,
            )
        # Without any id, the operation leaves its output as memory was.
        return tf.cond(
            tf.size(places) > 0,
            lambda: _BACKWARD[combiner](
                grad=upstream,
                indices=places,
                segment_ids=bags.bag,
                output_dim0=count,
            ),
            lambda: tf.zeros([count, rows.shape[1]], upstream.dtype),
        )

    return _linear(rows, to_bags, to_rows)


def _scaled(
    upstream: tf.Tensor, ones: tf.Tensor, bags: Bags, combiner: str
) -> tf.Tensor:
    """A gradient of bags over what they were divided by."""
    if combiner == "sum":
        return upstream
    if bags.lengths is None:
        size = tf.math.unsorted_segment_sum(ones, bags.bag, bags.num_bags)
    else:
        size = tf.cast(bags.lengths, ones.dtype)
    if combiner == "sqrtn":
        size = tf.sqrt(size)
    return upstream * tf.math.reciprocal_no_nan(size)[:, tf.newaxis]


def _linear(value: tf.Tensor, there: _Map, back: _Map) -> tf.Tensor:
    """A linear map and its transpose, each the gradient of the other.

    TensorFlow knows no gradient of the `Grad` operations.
    """

    @tf.custom_gradient
    def apply(value: tf.Tensor) -> Any:
        return there(value), lambda upstream: _linear(upstream, back, there)

    return apply(value)


def _pool_weighted(
    rows: tf.Tensor, places: tf.Tensor, gains: tf.Tensor, bags: Bags
) -> tf.Tensor:
    is_fast = sparse_product.is_fast(rows.dtype)

    @tf.custom_gradient
    def pooled(rows: tf.Tensor, gains: tf.Tensor) -> Any:
        def gradient(upstream: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            each = tf.gather(upstream, bags.bag)
            # Gathered anew: no second derivative passes through what was
            # computed outside, and few need a gradient to the weights.
            own = tf.gather(rows, places)
            count = tf.shape(rows)[0]
            if is_fast:
                to_rows = sparse_product.weighted_sums(
                    upstream, bags.bag, places, gains, count
                )
            else:
                to_rows = tf.math.unsorted_segment_sum(
                    each * gains[:, tf.newaxis], places, count
                )
            return to_rows, tf.reduce_sum(each * own, axis=1)

        if is_fast:
            output = sparse_product.weighted_sums(
                rows, places, bags.bag, gains, bags.num_bags
            )
        else:
            output = tf.raw_ops.SparseSegmentSumWithNumSegments(
                data=tf.gather(rows, places) * gains[:, tf.newaxis],
                indices=tf.range(tf.size(places)),
                segment_ids=bags.bag,
                num_segments=bags.num_bags,
            )
        return output, gradient

    return pooled(rows, gains)


def _pool_masked(
    rows: tf.Tensor, places: tf.Tensor, bags: Bags, combiner: str
) -> tf.Tensor:
    """The form for XLA: static shapes, absent ids masked instead of removed.

    Plain operations with their own gradients. What stands in the place of an
    absent id is any row; `tf.where` keeps even a NaN of it out.
    """
    present: Any = bags.present
    own = tf.where(present[:, tf.newaxis], tf.gather(rows, places), 0)
    weights = tf.ones_like(bags.bag, rows.dtype)
    if bags.weights is not None:
        weights = tf.cast(bags.weights, rows.dtype)
    weights = tf.where(present, weights, 0)
    gains = _gains(weights, bags.bag, bags.num_bags, combiner)
    return tf.math.unsorted_segment_sum(
        own * gains[:, tf.newaxis], bags.bag, bags.num_bags
    )


def _gains(
    weights: tf.Tensor, bag: tf.Tensor, num_bags: Any, combiner: str
) -> tf.Tensor:
    """`[N]`: each weight over the denominator of its bag, or 0 if that is 0."""
    if combiner == "sum":
        return weights
    if combiner == "mean":
        total = tf.math.unsorted_segment_sum(weights, bag, num_bags)
    else:
        squares = tf.math.unsorted_segment_sum(
            tf.square(weights), bag, num_bags
        )
        # The root's gradient is infinite at 0; keep 0 away from it.
        is_zero = tf.equal(squares, 0)
        root = tf.sqrt(tf.where(is_zero, tf.ones_like(squares), squares))
        total = tf.where(is_zero, tf.zeros_like(root), root)
    return tf.math.divide_no_nan(weights, tf.gather(total, bag))


def _concat(parts: list[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def _concat_or_none(parts: list[Any]) -> Any:
    if any(part is None for part in parts):
        return None
    return tf.concat(parts, 0)


def _split(value: tf.Tensor, sizes: list[Any]) -> list[tf.Tensor]:
    return [value] if len(sizes) == 1 else tf.split(value, sizes)
