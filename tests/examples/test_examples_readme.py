"""examples/README.md: a loop with its lines for checkpoints goes on where it was cut off."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from commands import ROOT

import gcjax

BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "examples" / "README.md").read_text(), re.DOTALL)


def loss_fn(params, x):
    return jnp.mean((x @ params["w"] - 1) ** 2)


@pytest.mark.parametrize("number", [0, 1])
def test_a_loop_with_checkpoints_goes_on_bit_for_bit(number, tmp_path):
    mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
    tx = optax.chain(gcjax.variance_compress(axis_name="data"), optax.adam(0.1))
    over_workers = jax.NamedSharding(mesh, jax.P("data"))
    rows = np.random.default_rng(0).normal(size=(6, 8, 40)).astype(np.float32)

    @jax.jit
    def train_step(params, opt_state, batch):
        specs = gcjax.state_specs(opt_state)

        def local(params, opt_state, batch):
            _, (grad, squares) = gcjax.value_and_moments(loss_fn)(params, batch)
            updates, opt_state = tx.update(grad, opt_state, params, sum_grad_squared=squares)
            return optax.apply_updates(params, updates), opt_state

        run = jax.shard_map(local, mesh=mesh, in_specs=(jax.P(), specs, jax.P("data")), out_specs=(jax.P(), specs))
        return run(params, opt_state, batch)

    def run(folder, steps):
        names = {"gcjax": gcjax, "loss_fn": loss_fn, "tx": tx, "mesh": mesh, "train_step": train_step, "steps": steps}
        names |= {"params": {"w": jnp.zeros((40, 3))}, "folder": folder}
        names["batches"] = [jax.device_put(row, over_workers) for row in rows]
        exec(BLOCKS[0].split("\n\n")[0] if number else "", names)  # the import
        exec(compile(BLOCKS[number], "README.md", "exec"), names)
        return names["state"]

    before = run(tmp_path / "cut", 3)  # the last checkpoint is that of step 2
    again, whole = run(tmp_path / "cut", 6), run(tmp_path / "whole", 6)
    assert sorted(path.name for path in (tmp_path / "cut").iterdir()) == ["4", "6"]
    assert any((np.asarray(a) != b).any() for a, b in zip(*map(jax.tree.leaves, (before, whole)), strict=True))
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(whole), strict=True):
        np.testing.assert_array_equal(a, b)
