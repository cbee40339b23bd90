"""The emulator's strategy behaves as TPUStrategy does."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

import tf_distembed as tde

api = tf.tpu.experimental.embedding


@pytest.fixture
def strategy() -> Iterator[tf.distribute.TPUStrategy]:
    with tde.testing.sparsecore_emulator(2) as strategy:
        yield strategy


def distributed(strategy, values):
    """One value a chip."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: values[context.replica_id_in_sync_group]
    )


def run(strategy, fn, *values, **kwargs) -> list:
    """Runs `fn` on both chips, each with its value; the results of each."""
    args = tuple(distributed(strategy, pair) for pair in values)
    function = tf.function(
        lambda args, kwargs: strategy.run(fn, args=args, kwargs=kwargs)
    )
    result = function(args, kwargs)
    return tf.nest.map_structure(
        lambda value: [
            each.numpy() for each in strategy.experimental_local_results(value)
        ],
        result,
    )


PAIR = (np.float32([1, 2]), np.float32([3, 4]))


def test_each_chip_gets_its_value(strategy) -> None:
    got = run(strategy, lambda x, y: (x + y, {"twice": 2 * x}), PAIR, PAIR)
    np.testing.assert_array_equal(got[0], [[2, 4], [6, 8]])
    np.testing.assert_array_equal(got[1]["twice"], [[2, 4], [6, 8]])


def test_each_chip_knows_its_number_only_when_it_runs(strategy) -> None:
    traced = []

    def fn():
        context = tf.distribute.get_replica_context()
        traced.append(tf.get_static_value(context.replica_id_in_sync_group))
        return context.replica_id_in_sync_group

    assert run(strategy, fn) == [0, 1]
    assert traced == [None]  # Traced once, for all chips.


def test_results_have_static_shapes(strategy) -> None:
    shapes = []

    @tf.function
    def step(x):
        result = strategy.run(lambda x: x[:, tf.newaxis], args=(x,))
        shapes.extend(
            each.shape for each in strategy.experimental_local_results(result)
        )

    step(distributed(strategy, PAIR))
    assert shapes == [(2, 1), (2, 1)]


def test_nothing_is_returned_for_nothing(strategy) -> None:
    assert tf.function(lambda: strategy.run(lambda: None))() is None


def test_eager_run_takes_a_tf_function_only(strategy) -> None:
    traces = []

    def plain(x):
        traces.append(1)
        return x + 1

    function = tf.function(plain)
    with pytest.raises(NotImplementedError, match="pure eager"):
        strategy.run(plain, args=(1,))
    for value in (1, 5):
        got = strategy.run(function, args=(tf.constant(value),))
        assert [int(each) for each in got.values] == [value + 1] * 2
    assert len(traces) == 1


def test_cross_replica_sums(strategy) -> None:
    def fn(x):
        context = tf.distribute.get_replica_context()
        return (
            context.all_reduce("SUM", x),
            context.all_reduce("MEAN", x),
            context.all_gather(x, axis=0),
            # Not a dtype that a TPU can sum: goes through an all-to-all.
            context.all_gather(tf.cast(x, tf.int64), axis=0),
        )

    total, mean, gathered, integers = run(strategy, fn, PAIR)
    np.testing.assert_array_equal(total, [[4, 6]] * 2)
    np.testing.assert_array_equal(mean, [[2, 3]] * 2)
    np.testing.assert_array_equal(gathered, [[1, 2, 3, 4]] * 2)
    np.testing.assert_array_equal(integers, [[1, 2, 3, 4]] * 2)


def test_cross_replica_sum_in_a_function_called_by_the_replica(
    strategy,
) -> None:
    with strategy.scope():
        variable = tf.Variable([10.0, 20.0])

    @tf.function
    def inner(x):
        context = tf.distribute.get_replica_context()
        return context.all_reduce("SUM", x) + variable

    got = run(strategy, lambda x: inner(x) * 2, PAIR)
    np.testing.assert_array_equal(got, [[28, 52]] * 2)


def test_cross_replica_sum_in_a_condition_is_refused(strategy) -> None:
    def fn(x):
        context = tf.distribute.get_replica_context()
        return tf.cond(
            x[0] > 0, lambda: context.all_reduce("SUM", x), lambda: x
        )

    with pytest.raises(
        NotImplementedError, match="Put the loop around strategy.run"
    ):
        run(strategy, fn, PAIR)


def test_conditions_and_loops(strategy) -> None:
    def fn(x):
        x = tf.cond(x[0] > 2, lambda: x + 1, lambda: x - 1)
        return tf.while_loop(
            lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (0, x)
        )[1]

    np.testing.assert_array_equal(run(strategy, fn, PAIR), [[0, 8], [32, 40]])


def test_mirrored_variable_is_updated_once_on_each_chip(strategy) -> None:
    with strategy.scope():
        variable = tf.Variable([1.0, 2.0], trainable=True)

    def fn(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable * x)
        gradient = tape.gradient(loss, variable)

        def merge(strategy, gradient):
            total = strategy.extended.reduce_to("SUM", gradient, variable)
            strategy.extended.update(
                variable, lambda v, g: v.assign_sub(g), args=(total,)
            )

        tf.distribute.get_replica_context().merge_call(merge, args=(gradient,))
        return variable.read_value()

    got = run(strategy, fn, PAIR)
    np.testing.assert_array_equal(got, [[-3, -4]] * 2)
    for copy in variable.values:
        np.testing.assert_array_equal(copy, [-3, -4])


def test_variable_is_summed_when_it_is_read(strategy) -> None:
    with strategy.scope():
        total = tf.Variable(
            0.0,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )
    for _ in range(2):
        run(strategy, lambda x: total.assign_add(tf.reduce_sum(x)), PAIR)
    assert float(total.read_value()) == 20


def test_reads_and_writes_keep_their_order(strategy) -> None:
    with strategy.scope():
        variable = tf.Variable(1.0, aggregation=tf.VariableAggregation.MEAN)

    def fn():
        before = variable.read_value()
        variable.assign_add(1.0)
        between = variable.read_value()
        variable.assign(between * 10)
        return before, between, variable.read_value()

    before, between, after = run(strategy, fn)
    assert (before, between, after) == ([1, 1], [2, 2], [20, 20])


def test_variable_as_an_argument(strategy) -> None:
    with strategy.scope():
        variable = tf.Variable([10.0, 20.0])
    x = distributed(strategy, PAIR)
    function = tf.function(
        lambda: strategy.run(lambda v, x: v + x, args=(variable, x))
    )
    got = strategy.experimental_local_results(function())
    np.testing.assert_array_equal(got, [[11, 22], [13, 24]])


def test_variables_can_be_made_at_the_first_call(strategy) -> None:
    made = []

    def fn(x):
        if not made:
            made.append(tf.Variable(tf.zeros([2]), name="late"))
        made[0].assign_add([1.0, 2.0])
        return made[0] + x

    function = tf.function(
        lambda: strategy.run(fn, args=(distributed(strategy, PAIR),))
    )
    for times in (1, 2):
        got = strategy.experimental_local_results(function())
        np.testing.assert_array_equal(
            got, np.array(PAIR) + times * np.array([1, 2])
        )
    assert len(made[0].values) == 2


def test_host_block_works_on_strings_and_unknown_sizes(strategy) -> None:
    ragged = (
        tf.ragged.constant([["1", "20"], []]),
        tf.ragged.constant([["3"], ["4", "5", "6"]]),
    )

    def on_host(words):
        numbers = tf.ragged.map_flat_values(tf.strings.to_number, words)
        return tf.ensure_shape(tf.reduce_sum(numbers, axis=1), [2])

    def fn(words):
        sums = tf.compat.v1.tpu.outside_compilation(on_host, words)
        return sums * 2

    got = run(strategy, fn, ragged)
    np.testing.assert_array_equal(got, [[42, 0], [6, 30]])


def test_batches_of_unknown_and_different_size(strategy) -> None:
    """TPUStrategy fills them up, and a TPU leaves the filling out."""

    @tf.function(
        input_signature=[tf.TensorSpec([None], tf.float32)] * 2,
    )
    def step(first, second):
        def fn(x):
            return x * 2 + tf.range(4.0)[: tf.shape(x)[0]]

        return strategy.run(fn, args=(distributed(strategy, (first, second)),))

    got = step(tf.ones([3]), tf.ones([0]))
    assert [each.numpy().tolist() for each in got.values] == [[2, 3, 4], []]


def test_batches_of_different_known_sizes(strategy) -> None:
    batches = distributed(strategy, (tf.ones([3, 2]), tf.ones([1, 2])))
    shapes = []

    def fn(x):
        shapes.append(x.shape.as_list())
        return x * 2

    got = tf.function(lambda: strategy.run(fn, args=(batches,)))()
    assert [each.shape for each in got.values] == [(3, 2), (1, 2)]
    assert shapes == [[None, 2]]


@pytest.mark.parametrize("rows", [(3, 1), (None, None)])
def test_host_block_cannot_have_a_batch_that_a_tpu_fills_up(
    strategy, rows
) -> None:
    """TPUStrategy says on the TPU how much of it is real."""
    spec = [tf.TensorSpec([size], tf.float32) for size in rows]

    @tf.function(input_signature=spec)
    def step(first, second):
        def fn(x):
            total = tf.compat.v1.tpu.outside_compilation(tf.reduce_sum, x)
            return tf.ensure_shape(total, []) + tf.reduce_sum(x)

        return strategy.run(fn, args=(distributed(strategy, (first, second)),))

    with pytest.raises(ValueError, match="a host block gets a tensor that"):
        step(tf.ones([3]), tf.ones([1]))


def test_loop_over_a_distributed_dataset(strategy) -> None:
    dataset = tf.data.Dataset.from_tensor_slices(tf.range(24.0)).batch(8)

    @tf.function
    def steps(iterator, count):
        total = tf.constant(0.0)
        for _ in tf.range(count):
            sums = strategy.run(tf.reduce_sum, args=(next(iterator),))
            total += strategy.reduce("SUM", sums, axis=None)
        return total

    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    assert float(steps(iterator, tf.constant(3))) == sum(range(24))


def test_ragged_dataset_is_distributed_without_prefetch_only(
    strategy,
) -> None:
    rows = tf.ragged.constant([[1], [], [2, 3], [4], [], [5, 6, 7]])
    dataset = tf.data.Dataset.from_tensor_slices(rows)
    dataset = dataset.ragged_batch(4, drop_remainder=True)
    with pytest.raises(ValueError, match="experimental_fetch_to_device"):
        strategy.experimental_distribute_dataset(dataset)
    iterator = iter(
        strategy.experimental_distribute_dataset(
            dataset,
            tf.distribute.InputOptions(experimental_fetch_to_device=False),
        )
    )

    @tf.function
    def step(iterator):
        def on_host(rows):
            return tf.ensure_shape(tf.reduce_sum(rows, axis=1), [2])

        return strategy.run(
            lambda rows: tf.compat.v1.tpu.outside_compilation(on_host, rows),
            args=(next(iterator),),
        )

    assert strategy.gather(step(iterator), axis=0).numpy().tolist() == [
        *(1, 0, 5, 4),
    ]


def test_gather_clamps_and_scatter_drops_as_on_a_tpu(strategy) -> None:
    with strategy.scope():
        table = tf.Variable([[0.0], [1.0], [2.0]])
        ids = tf.constant([5, -1, 1])

    def fn():
        gathered = tf.gather(table.read_value(), ids)
        looked_up = tf.gather(table, ids)
        updates = tf.IndexedSlices([[7.0], [8.0], [9.0]], ids)
        tf.raw_ops.ResourceScatterUpdate(
            resource=table.handle,
            indices=updates.indices,
            updates=updates.values,
        )
        return gathered[:, 0], looked_up[:, 0], table.read_value()[:, 0]

    gathered, looked_up, after = run(strategy, fn)
    np.testing.assert_array_equal(gathered, [[2, 0, 1]] * 2)
    np.testing.assert_array_equal(looked_up, [[2, 0, 1]] * 2)
    np.testing.assert_array_equal(after, [[0, 9, 2]] * 2)


def test_assertions_of_the_replica_do_nothing_as_on_a_tpu(strategy) -> None:
    def fn(x):
        tf.debugging.assert_less(x, 0.0, "Not on a TPU.")
        return x

    np.testing.assert_array_equal(run(strategy, fn, PAIR), PAIR)


def test_assertions_of_a_host_block_raise(strategy) -> None:
    def on_host(x):
        with tf.control_dependencies([tf.debugging.assert_less(x, 3.0, "No")]):
            return tf.identity(x)

    with pytest.raises(tf.errors.InvalidArgumentError, match="No"):
        run(
            strategy,
            lambda x: tf.compat.v1.tpu.outside_compilation(on_host, x),
            PAIR,
        )


def embedding_on(strategy, **limits) -> api.TPUEmbeddingV2:
    with strategy.scope():
        return api.TPUEmbeddingV2(
            {
                name: api.FeatureConfig(
                    api.TableConfig(64, 8, name=name), output_shape=[8]
                )
                for name in ("first", "second")
            },
            api.SGD(0.1),
            sparse_core_embedding_config=api.SparseCoreEmbeddingConfig(
                **limits
            ),
        )


@pytest.mark.parametrize(
    "limits, message",
    [
        (
            {"max_ids_per_table": {"first_second": 1}},
            "Sparse core 1 gets 2 ids while the max ids per sparse core is "
            "set to be 1 for table first_second",
        ),
        (
            {"max_unique_ids_per_table": {"first_second": 1}},
            "Sparse core 1 gets 2 unique ids while the max unique ids per "
            "sparse core is set to be 1 for table first_second",
        ),
        (
            {"max_ids_per_chip_per_sample": 1},
            "The max_ids_per_chip is set to be 16 which is not going to fit "
            "all ids.",
        ),
    ],
)
def test_limits_raise_as_tensorflows_kernels_do(
    strategy, limits: dict, message: str
) -> None:
    embedding = embedding_on(strategy, **limits)
    ids = tf.constant([1, 9, 2, 3, 4, 5, 6, 7])
    with pytest.raises(tf.errors.InvalidArgumentError, match=message):
        run(
            strategy,
            lambda ids: embedding({"first": ids, "second": ids})[0],
            (ids, ids),
        )


def test_shards_that_are_no_power_of_two_raise() -> None:
    with tde.testing.sparsecore_emulator(3, 4) as strategy:
        embedding = embedding_on(strategy)
        ids = tf.zeros([8], tf.int32)
        function = tf.function(
            lambda: strategy.run(
                lambda: embedding({"first": ids, "second": ids})[0]
            )
        )
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match="num_sc_shards 12 is not a power of two",
        ):
            function()


def test_id_outside_of_the_stack_raises(strategy) -> None:
    embedding = embedding_on(strategy)
    ids = tf.constant([0] * 7 + [1000])
    with pytest.raises(
        tf.errors.InvalidArgumentError, match="Is an id outside of"
    ):
        run(
            strategy,
            lambda ids: embedding({"first": ids, "second": ids})[0],
            (ids, ids),
        )


def test_lookup_in_a_function_of_the_replica_raises(strategy) -> None:
    """TPUEmbeddingV2's own check, for which it must see a TPU's context."""
    embedding = embedding_on(strategy)
    lookup = tf.function(lambda ids: embedding({"first": ids, "second": ids}))
    with pytest.raises(RuntimeError, match="called inside control flow or a"):
        run(strategy, lambda ids: lookup(ids)[0], (np.ones(8, np.int32),) * 2)


def test_host_operations_run_eagerly(strategy) -> None:
    table = api.TableConfig(64, 8, name="table")
    feature = api.FeatureConfig(table, output_shape=[8])
    ids = tf.constant([1, 9, 17, 2, 3, 4, 1, 6])
    most, most_different = api.TPUEmbeddingV2.compute_sparse_core_stats(
        [ids], [feature], num_tpu_chips=2, optimizer=api.SGD(0.1)
    )
    # A SparseCore has 2 of the 8 samples; ids 1 and 9 are in one shard.
    assert int(most["table"]) == 2
    assert int(most_different["table"]) == 2


def test_shards_and_checkpoints(strategy, tmp_path) -> None:
    embedding = embedding_on(strategy)
    embedding.build()
    (shards,) = embedding.embedding_table_shards.values()
    assert [values.shape for _, values in shards] == [(64, 8), (64, 8)]
    assert all(np.any(values) for _, values in shards)
    path = tf.train.Checkpoint(model=embedding).save(tmp_path / "checkpoint")
    other = embedding_on(strategy)
    other.build()
    for copy in other.embedding_tables["first_second"].values:
        copy.assign(tf.zeros_like(copy))
    status = tf.train.Checkpoint(model=other).restore(path)
    status.assert_existing_objects_matched()
    (after,) = other.embedding_table_shards.values()
    for (_, saved), (_, restored) in zip(shards, after, strict=True):
        np.testing.assert_array_equal(saved, restored)
