"""Under jax_enable_x64 every method runs the same program, in 32 bits, and updates keep the gradient's dtype."""

import jax
import jax.numpy as jnp
import numpy as np
from harness import Runner, sample_gradients
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal
from row_steps import PARAMS, inputs, runner_of
from rows import SIZES, group_of, methods, name_of, of_each_kind, usual
from selection import cases

from gcjax._comm.simulated import simulated_workers


def operations(jaxpr):
    """Name, literals and types of every operation, those of nested programs too."""
    for eqn in jaxpr.eqns:
        literals = [str(atom) for atom in eqn.invars if isinstance(atom, Literal)]
        yield eqn.primitive.name, literals, [str(x.aval) for x in (*eqn.invars, *eqn.outvars)]
        for value in jax.tree.leaves(list(eqn.params.values())):
            if isinstance(value, Jaxpr | ClosedJaxpr):
                yield from operations(value)


def program(row, x64):
    """What a step of 8 workers is traced to, from `init` on."""
    with jax.enable_x64(x64):
        tx = row.make(None)

        def step(gradient, zeros):
            with simulated_workers(8, zeros, []):
                return tx.update(gradient, tx.init(gradient), sum_grad_squared=gradient)

        return list(operations(jax.make_jaxpr(step)(PARAMS, jnp.zeros(8, jnp.int32))))


@cases("row", methods(), default=(usual, 10), ids=name_of, marks=group_of)
def test_the_program_is_the_same_under_x64(row):
    assert program(row, x64=True) == program(row, x64=False)


@cases("row", methods(), default=(of_each_kind, 2), ids=name_of, marks=group_of)
def test_updates_under_x64_have_the_same_bits_and_the_gradients_dtypes(row):
    gradients, squares = sample_gradients(8, SIZES, 3)
    usual = runner_of(row)
    expected = [usual.step(inputs(g), inputs(s)) for g, s in zip(gradients, squares, strict=True)]

    def widened(tree):
        return {**tree, "a": tree["a"].astype(np.float64)}

    with jax.enable_x64(True):
        runner = Runner(row.make("data"), widened(PARAMS), 8)
        for g, s, update in zip(gradients, squares, expected, strict=True):
            got = runner.step(widened(inputs(g)), inputs(s))
            assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in widened(update).items()}
            jax.tree.map(np.testing.assert_array_equal, got, update)
        states = jax.tree.leaves(runner.state)
    assert {x.dtype.name for x in states} <= {"float32", "int32", "uint32", "bool"}
