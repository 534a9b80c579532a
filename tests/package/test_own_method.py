"""The method in docs/extend.md, which tests/laws test, imports only public names; mistakes in its like are named."""

import ast
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from own_method import SOURCE

import gcjax.extend as gx


def test_it_imports_only_public_names():
    for node in ast.walk(ast.parse(SOURCE)):
        if isinstance(node, ast.ImportFrom):
            assert "._" not in f".{node.module}"
            assert not any(alias.name.startswith("_") for alias in node.names)


def test_a_message_without_the_scales_that_its_code_needs_raises():
    def update(step, state):
        x = state.bucket.join(step.gradient)
        message = gx.Message(x, gx.pack_mask(x > 0), gx.power_of_two_code(), state.bucket, (32,))
        gx.exchange(message, state.transport, step.comm, step.go)

    def init(bucket):
        return gx.SparseState.create(bucket, reset=gx.reset_to_zero, transport="all_gather")

    tx = gx.compress(gx.Compressor(init, update))
    with pytest.raises(ValueError, match="the message has no scales, which its code needs"):
        jax.eval_shape(tx.update, jnp.ones(4), tx.init(jnp.ones(4)))


PARAMS = {"w": jnp.ones((100, 41)), "b": jnp.ones(3)}


def update_once(method):
    tx = gx.compress(method)
    return jax.eval_shape(tx.update, PARAMS, tx.init(PARAMS))


def above(a, step, bucket):
    return gx.pack_mask(jnp.abs(a) > 0.5)


PACK = (
    r"select must return a packed mask, uint32\[256\], got {}.*shape \(2, 32, 128\), use gcjax.extend.pack_mask\(mask\)"
)
SLOTS = "capacity must be a number of slots, a tuple of them, or a share of the entries as a float, got {}"


@pytest.mark.parametrize(
    ("select", "capacity", "message"),
    [
        (lambda a, step, bucket: jnp.abs(a) > 0.5, lambda bucket: 512, PACK.format(r"bool\[2, 32, 128\]")),
        (lambda a, step, bucket: jnp.arange(4), lambda bucket: 512, PACK.format(r"int32\[4\]")),
        (lambda a, step, bucket: above(a, step, bucket)[:1], lambda bucket: 512, PACK.format(r"uint32\[1\]")),
        (lambda a, step, bucket: None, lambda bucket: 512, PACK.format("None")),
        (
            None,
            lambda bucket: 512,
            "select must be a function, such as lambda a, step, bucket: .*pack_mask.*, got None",
        ),
        (above, 512, "capacity must be a function, such as lambda bucket: 512, got 512"),
        (above, 0.5, "capacity must be a function, such as lambda bucket: 0.5, got 0.5"),
        (above, lambda bucket: 0, SLOTS.format(0)),
        (above, lambda bucket: (64, 0.5), SLOTS.format(r"\(64, 0.5\)")),
        (above, lambda bucket: [64], SLOTS.format(r"\[64\]")),
        (above, lambda bucket: "all", SLOTS.format("'all'")),
    ],
)
def test_mistakes_in_a_sparse_method_are_named(select, capacity, message):
    with pytest.raises((TypeError, ValueError), match=message):
        update_once(gx.sparse_method(select, capacity))


@pytest.mark.parametrize("capacity", [1, 64, np.int64(64), (32, 64), 0.5, 1.0, None])
def test_capacities_of_a_sparse_method_may_be(capacity):
    update_once(gx.sparse_method(above, lambda bucket: capacity))


def words(x, bucket, key):
    return gx.float_bits(x).reshape(-1), 32 * bucket.entries


def floats(payload, bucket):
    return gx.bits_float(payload).reshape(bucket.shape)


@pytest.mark.parametrize(
    ("encode", "decode", "message"),
    [
        (lambda *args: words(*args)[0], floats, r"encode must return \(payload, bits\), .* got .*uint32"),
        (words, lambda payload, bucket: gx.bits_float(payload), r"shape \(2, 32, 128\), got float32\[8192\]"),
        (
            words,
            lambda payload, bucket: payload.reshape(bucket.shape),
            r"must return floats .* got uint32\[2, 32, 128\]",
        ),
    ],
)
@pytest.mark.parametrize("transport", ["all_gather", "two_phase"])
def test_mistakes_in_a_code_are_named(encode, decode, message, transport):
    with pytest.raises(TypeError, match=message):
        update_once(gx.dense_codec(encode, decode, feedback=True, transport=transport))
    update_once(gx.dense_codec(words, floats, feedback=True, transport=transport))


@dataclasses.dataclass
class Unregistered:
    bucket: gx.Bucket
    residual: float = 0.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class WithoutResidual:
    x: jax.Array
    bucket: gx.Bucket = dataclasses.field(metadata={"static": True})


REPORT = gx.dense_report(1, 1)


def nothing(step, state):
    return gx.StepResult(step.gradient, state, REPORT)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (gx.Compressor(Unregistered, nothing), "a pytree node .* got a Unregistered not registered by jax.tree_util"),
        (
            gx.Compressor(lambda bucket: WithoutResidual(jnp.zeros(3), bucket), nothing),
            "WithoutResidual without residual",
        ),
        (gx.Compressor(lambda bucket: {"x": jnp.zeros(3)}, nothing), "got a dict without bucket and residual"),
        (
            gx.Compressor(gx.EmptyState, lambda x, own: gx.StepResult(own.bucket.join(x.gradient), own, REPORT)),
            r"got 1 for 2, the first wrong one \(2, 32, 128\) for \(3,\)\. Bucket.split cuts",
        ),
        (
            gx.Compressor(gx.EmptyState, lambda x, own: gx.StepResult(x.gradient[:1], own, REPORT)),
            r"got 1 for 2, the first wrong one None for \(100, 41\)",
        ),
        (gx.Compressor(gx.EmptyState, lambda x, own: (x.gradient, own)), "return a StepResult.* got a tuple of 2"),
        (
            gx.Compressor(gx.EmptyState, lambda x, own: gx.StepResult(x.gradient, own, None)),
            "a SendReport, as dense_report, got None",
        ),
        (gx.dense_codec, "compress takes a Compressor, .* got <function dense_codec"),
    ],
)
def test_mistakes_in_a_compressor_are_named(method, message):
    with pytest.raises(TypeError, match=message):
        update_once(method)
    update_once(gx.Compressor(gx.EmptyState, nothing))


@pytest.mark.parametrize(
    ("compress", "decompress", "message"),
    [
        (lambda x, key: 2.0, lambda arrays, shape: arrays, "arrays of 1, 2 or 4 bytes an entry, got 2.0"),
        (lambda x, key: (), lambda arrays, shape: arrays, "arrays of 1, 2 or 4 bytes an entry, got nothing"),
        (
            lambda x, key: x.astype(jnp.complex64),
            lambda arrays, shape: arrays,
            r"1, 2 or 4 bytes an entry, got complex64\[3\]",
        ),
        (lambda x, key: x, lambda arrays, shape: arrays[:2], r"floats of the leaf's shape \(3,\), got float32"),
        (lambda x, key: x, lambda arrays, shape: arrays > 0, r"floats of the leaf's shape \(3,\), got bool"),
        (None, lambda arrays, shape: arrays, "compress must be a function, such as lambda x, key"),
        (lambda x, key: x, None, "decompress must be a function, such as lambda arrays, shape"),
    ],
)
def test_mistakes_in_a_leaf_codec_are_named(compress, decompress, message):
    with pytest.raises(TypeError, match=message):
        jax.jit(update_once, static_argnums=0)(gx.leaf_codec(compress, decompress))


def test_the_arrays_of_a_leaf_arrive_bit_by_bit():
    sent = (jnp.float16([1.5, -0.0]), jnp.int8([-7, 0, 1]), jnp.array([True, False, True]), jnp.bfloat16(3.0))
    seen = []

    def decompress(arrays, shape):
        seen.append(arrays)
        return jnp.zeros(shape)

    gx.compress(gx.leaf_codec(lambda x, key: sent, decompress)).update(jnp.ones(3), update_state(jnp.ones(3), sent))
    for got, wanted in zip(seen[-1], sent, strict=True):
        assert got.dtype == wanted.dtype
        np.testing.assert_array_equal(got, wanted)


def update_state(params, sent):
    return gx.compress(gx.leaf_codec(lambda x, key: sent, lambda arrays, shape: jnp.zeros(shape))).init(params)
