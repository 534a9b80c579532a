"""The method in docs/extend.md works, imports only public names, and keeps the laws."""

import ast
import pathlib
import re

import jax.numpy as jnp
import pytest
import test_laws
from rows import Row

import gcjax.extend as gx

TEXT = (pathlib.Path(__file__).parents[2] / "docs/extend.md").read_text()
BLOCK = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
NAMES: dict = {}
exec(compile(BLOCK, "extend.md", "exec"), NAMES)


def make(axis_name=None, **more):
    return NAMES["scaled_sign_compress"](axis_name=axis_name, **more)


ROW = Row("scaled_sign", "scaled_sign_compress", make, None, conserves=True)


def test_it_imports_only_public_names():
    for node in ast.walk(ast.parse(BLOCK)):
        if isinstance(node, ast.ImportFrom):
            assert "._" not in f".{node.module}"
            assert not any(alias.name.startswith("_") for alias in node.names)


@pytest.mark.parametrize(
    "law",
    [
        test_laws.test_nothing_is_lost,
        test_laws.test_the_update_is_bit_equal_on_all_workers,
        test_laws.test_the_update_is_typed_as_replicated,
        test_laws.test_the_wire_carries_only_the_payload_dtypes,
        test_laws.test_payload_bits_do_not_exceed_wire_bytes,
        test_laws.test_two_steps_trace_once,
    ],
    ids=lambda law: law.__name__,
)
def test_it_keeps_the_laws(law):
    law(ROW)


def test_its_wire_bytes_are_those_compiled():
    test_laws.test_wire_bytes_equal_the_compiled_collectives(ROW, 8)


def test_a_bad_step_leaves_no_trace():
    test_laws.test_a_non_finite_step_leaves_no_trace(ROW, float("nan"))


def test_a_message_without_the_scales_that_its_code_needs_raises():
    def update(gradient, sum_grad_squared, state, comm, all_finite):
        del sum_grad_squared
        x = state.bucket.join(gradient)
        gx.exchange(
            gx.Message(x, gx.pack_mask(x > 0), gx.power_of_two_code(), state.bucket, (32,)),
            state.transport,
            comm,
            all_finite,
        )

    def init(bucket):
        return gx.SparseState.create(bucket, reset=gx.reset_to_zero, transport="all_gather")

    tx = gx.compress(gx.Compressor(init, update))
    with pytest.raises(ValueError, match="the message has no scales, which its code needs"):
        tx.update(jnp.ones(4), tx.init(jnp.ones(4)))
