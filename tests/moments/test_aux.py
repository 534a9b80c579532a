"""Integers and booleans in auxiliary output and model state, of which no mean can be taken."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of
from selection import cases

import gcjax
from gcjax import value_and_moments

W, X = jnp.ones(4), jnp.arange(-16.0, 16.0).reshape(8, 4) + 0.5
SYNCED = {"sample_axis": "samples"}
METHODS = [{}, {"method": "vmap"}, {"method": "scan"}, {"microbatches": 2}, {"max_bytes": 1}, SYNCED]


def aux_of(fn):
    """A loss with `fn(outputs, w, x)` as its aux."""
    return lambda w, x: (jnp.mean((x @ w) ** 2), {"n": fn(x @ w, w, x)})


def scanned(body):
    """`fn` for `aux_of`: the last value of `body(count, outputs)` in a scan that carries the outputs too."""

    def fn(out, w, x):
        del w, x
        return jax.lax.scan(lambda c, _: ((body(*c), 2 * c[1]), None), (jnp.int32(0), out), length=3)[0][0]

    return fn


def delayed(out, w, x):
    """A count that reaches the result through a carry that starts as a constant."""
    del w, x
    return jax.lax.scan(lambda carry, _: ((carry[1], jnp.sum(out > 0)), None), (0, 0), length=3)[0][0]


@jax.custom_vjp
def counted(out, count):
    return 2 * out, count + 1


counted.defvjp(lambda out, count: (counted(out, count), None), lambda _, g: (2 * g[0], None))

DEPENDENT = {
    "count": lambda out, w, x: jnp.sum(out > 0),
    "boolean": lambda out, w, x: jnp.all(out > 0),
    "in jit": lambda out, w, x: jax.jit(jnp.sum)(out > 0),
    "in scan": scanned(lambda count, out: count + jnp.sum(out > 0)),
    "from a scan's other carry": scanned(lambda count, out: jnp.sum(out > 0)),
    "a step later in scan": delayed,
    "in cond": lambda out, w, x: jax.lax.cond(w[0] > 0, lambda: jnp.sum(out > 0), lambda: 0),
    "which branch": lambda out, w, x: jax.lax.cond(jnp.sum(out) > 0, lambda: 1, lambda: 2),
    "histogram": lambda out, w, x: jnp.histogram(out, 3)[0].astype(int),
}
INDEPENDENT = {
    "constant": (lambda out, w, x: 7, 7),
    "batch size": (lambda out, w, x: x.shape[0], 8),
    "ones": (lambda out, w, x: jnp.ones_like(out, dtype=int).sum(), 8),
    "parameters": (lambda out, w, x: jnp.sum(w > 0), 4),
    "in jit": (lambda out, w, x: jax.jit(lambda out, w: (out, jnp.sum(w > 0)))(out, w)[1], 4),
    "in scan": (scanned(lambda count, out: count + out.shape[0]), 24),
    "in checkpoint": (lambda out, w, x: jax.checkpoint(lambda a, b: (a + b, jnp.argmin(b)))(out[0], w)[1], 0),
    "in cond": (lambda out, w, x: jax.lax.cond(w[0] > 0, lambda a, b: (b + 1, a), lambda a, b: (b, a), out, 5)[0], 6),
    "in custom_vjp": (lambda out, w, x: counted(out, jnp.int32(3))[1], 4),
    "relu": (lambda out, w, x: jnp.sum(jax.nn.relu(w) > 0), 4),
    "ids": (lambda out, w, x: jnp.arange(3), [0, 1, 2]),
}


@cases(("case", "options"), itertools.product(DEPENDENT, METHODS), default=8, ids=str)
def test_integers_that_depend_on_samples_raise_with_the_cures(case, options):
    fn = value_and_moments(aux_of(DEPENDENT[case]), has_aux=True, **options)
    with pytest.raises(TypeError, match=r"leaf \['n'\] .*(int32|bool)\[.*one value for each sample.*jnp\.mean"):
        jax.eval_shape(fn, W, X)


@cases(("case", "options"), itertools.product(INDEPENDENT, METHODS), default=8, ids=str)
def test_integers_that_depend_on_no_sample_are_those_of_the_batch(case, options):
    fn, expected = INDEPENDENT[case]
    (_, aux), _ = jax.jit(value_and_moments(aux_of(fn), has_aux=True, **options))(W, X)
    if options == SYNCED and case in ("batch size", "ones", "in scan"):
        expected //= 8  # the loss sees one sample, and the axis has the others
    np.testing.assert_array_equal(aux["n"], expected)


def test_integers_with_an_axis_of_samples_are_concatenated():
    for options in METHODS:
        (_, aux), _ = value_and_moments(aux_of(lambda out, w, x: out > 0), has_aux=True, **options)(W, X)
        np.testing.assert_array_equal(aux["n"], X @ W > 0)


def test_a_count_over_the_sample_axis_is_that_of_the_batch():
    count = aux_of(lambda out, w, x: jax.lax.psum(jnp.sum(out > 0), "samples"))
    (_, aux), _ = value_and_moments(count, has_aux=True, **SYNCED)(W, X)
    assert int(aux["n"]) == 4
    index = aux_of(lambda out, w, x: jax.lax.axis_index("samples"))
    with pytest.raises(TypeError, match="depends on the samples"):
        value_and_moments(index, has_aux=True, **SYNCED)(W, X)


@pytest.mark.parametrize("options", [{"microbatches": 1}, {}])
def test_one_group_counts_for_itself(options):
    batch = X if options else X[-1:]
    (_, aux), _ = value_and_moments(aux_of(DEPENDENT["count"]), has_aux=True, **options)(W, batch)
    assert int(aux["n"]) == (4 if options else 1)


def test_printing_in_the_loss_is_no_dependence_and_is_not_repeated(capfd):
    def loss(w, x):
        jax.debug.callback(lambda out: print("seen", out.size), x @ w)
        return jnp.mean((x @ w) ** 2), w.size + jnp.sum(w > 0)

    (_, aux), _ = jax.jit(value_and_moments(loss, has_aux=True, method="scan"))(W, X)
    jax.effects_barrier()
    assert int(aux) == 8
    printed = capfd.readouterr().out
    assert printed.count("seen 1\n") == 8
    assert "seen 8" not in printed


def step_of(loss, **options):
    tx = optax.chain(gcjax.dense_compress(axis_name="data"), optax.sgd(1e-4))
    return gcjax.make_train_step(loss, tx, mesh_of(2), **options)


COUNT = aux_of(DEPENDENT["count"])
MERGED = {
    "squares": {"moments": value_and_moments},
    "parts": {"moments": None, "accumulate": 2},
    "squares of parts": {"moments": value_and_moments, "accumulate": 2},
}


@pytest.mark.parametrize("options", MERGED.values(), ids=MERGED)
def test_a_step_does_not_return_one_part_s_count(options):
    step = step_of(COUNT, has_aux=True, **options)
    with pytest.raises(TypeError, match=r"leaf .*\['n'\] .*int32\[\].*one value for each sample"):
        step(step.init(W), X)
    step = step_of(aux_of(lambda out, w, x: out > 0), has_aux=True, **options)
    np.testing.assert_array_equal(step(step.init(W), X)[1].aux["n"].sum(axis=1), [0, 4])


def test_a_step_without_parts_returns_the_count():
    step = step_of(COUNT, has_aux=True, moments=None)
    np.testing.assert_array_equal(step(step.init(W), X)[1].aux["n"], [0, 4])


def test_a_compressed_gradient_does_not_return_one_sample_s_count():
    tx = gcjax.dense_compress(axis_name="data")
    fn = gcjax.compressed_value_and_grad(COUNT, tx, mesh_of(2), has_aux=True, moments=value_and_moments)
    with pytest.raises(TypeError, match=r"leaf .*\['n'\] .*int32\[\].*one value for each sample"):
        jax.eval_shape(fn, W, fn.init(W), X)


def stateful(change, read=lambda state: 0):
    """A loss whose integer state becomes `change(state, outputs)`, and whose aux is `read(new state)`."""

    def loss(w, x, *, model_state):
        out = x @ w
        new = {"n": change(model_state["n"], out), "mean": 0.9 * model_state["mean"] + 0.1 * jnp.mean(out)}
        return jnp.mean(out**2), new, read(new)

    return loss


START = {"n": jnp.int32(5), "mean": jnp.float32(0)}


@pytest.mark.parametrize("options", [*MERGED.values(), {"moments": None}], ids=[*MERGED, "plain"])
def test_integers_of_the_model_state_that_depend_on_no_sample_count_on(options):
    step = step_of(stateful(lambda n, out: n + out.shape[0], lambda new: new["n"]), has_aux=True, **options)
    state, metrics = step(step.init(W, model_state=START), X)
    np.testing.assert_array_equal(state.model_state.stacked()["n"], [9, 9])
    np.testing.assert_array_equal(metrics.aux, [9, 9])


def test_integers_of_the_model_state_that_depend_on_samples_need_a_gradient_without_squares():
    loss = stateful(lambda n, out: n + jnp.sum(out > 0))
    step = step_of(loss, has_aux=True, moments=value_and_moments)
    with pytest.raises(TypeError, match=r"leaf .*model_state\['n'\] .*int32\[\].*moments=None"):
        step(step.init(W, model_state=START), X)
    for accumulate in (1, 2):
        step = step_of(loss, has_aux=True, moments=None, accumulate=accumulate)
        state, _ = step(step.init(W, model_state=START), X)
        np.testing.assert_array_equal(state.model_state.stacked()["n"], [5, 9])


def test_aux_of_parts_that_reads_a_state_of_samples_raises():
    loss = stateful(lambda n, out: n, lambda new: new["mean"] > 0)

    def before(w, x, *, model_state):
        value, new, _ = loss(w, x, model_state=model_state)
        return value, new, model_state["mean"] > 0

    step = step_of(before, has_aux=True, moments=None, accumulate=2)
    with pytest.raises(TypeError, match=r"bool\[\]"):
        step(step.init(W, model_state=START), X)
