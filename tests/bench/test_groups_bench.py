"""bench.groups and bench.step --whole on a small model."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bench import groups, whole

RNG = np.random.default_rng(0)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(8, 6)) / 3, jnp.float32), "v": jnp.asarray(RNG.normal(size=6), jnp.float32)}


def loss(params, batch):
    return jnp.mean((jnp.tanh(batch["x"] @ params["w"]).sum(1) @ params["v"] - batch["y"]) ** 2)


def batches():
    while True:
        x = RNG.normal(size=(64, 4, 8)).astype(np.float32)
        yield {"x": x, "y": x[:, :, 0].sum(1)}


def test_all_samples_decide_as_all_samples_and_more_groups_decide_better():
    rows = groups.decisions(loss, PARAMS, batches(), groups.EVALUATED)
    for alpha in groups.ALPHAS:
        exact = rows[f"all samples, {alpha}"]
        assert exact["false"] == exact["missed"] == 0 < exact["passed"] < 1
        wrong = [rows[f"{g} groups, {alpha}"]["false"] + rows[f"{g} groups, {alpha}"]["missed"] for g in (2, 16)]
        assert 0 < wrong[1] < wrong[0] < 1


@pytest.fixture
def small_model(monkeypatch):
    monkeypatch.setattr(whole, "cpu_model", lambda name: (loss, PARAMS, next(batches())))
    monkeypatch.setattr(whole, "WARM_UP", 1)


@pytest.mark.usefixtures("small_model")
def test_every_part_of_a_step_is_another_program_and_is_shown():
    found = whole.on_this_cpu({"model": "small", "repeats": 1})
    assert list(found["programs"]) == [*whole.STAGES, whole.TOP_K]
    assert 0 < found["density"] < 1
    record = {
        "machine": {"cpu": "c", "architecture": "a", "cores": 2, "memory_gb": 1},
        **{"versions": {}, "commit": "", "source": "", "command": ""},
        "rows": [{"target": "cpu", "model": "small", **found}],
    }
    lines = whole.table(record).splitlines()
    assert [line.split("|")[1].strip() for line in lines[-len(found["programs"]) :]] == list(found["programs"])


@pytest.mark.usefixtures("small_model")
def test_no_part_of_a_step_is_left_out_by_the_compiler():
    mesh = jax.make_mesh((1,), ("data",))
    batch = jax.device_put(next(batches()), jax.NamedSharding(mesh, jax.P("data")))
    flops = {}
    for name, stage in whole.STAGES.items():
        step = whole.make_step(stage, loss, mesh)
        state = step.init(PARAMS)
        with whole.ending(stage.end):
            flops[name] = len(step.lower(state, batch).compile().as_text().splitlines())
    order = ["plain", "squares", "accumulate and criterion", "message", "exchange and decode"]
    assert all(flops[a] < flops[b] for a, b in itertools.pairwise(order)), flops
