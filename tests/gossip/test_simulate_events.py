"""Simulated pairs against loops in NumPy, event by event."""

import functools

import jax
import numpy as np
import optax
import pytest
from gossip_workers import partner_of
from harness import mesh_of
from simulated_nodes import (
    KEY,
    MOMENTUM,
    NODES,
    RATE,
    SAMPLES,
    SIZE,
    Loops,
    events_of,
    least_squares,
    loss_fn,
    random_events,
    trainer,
)

import gcjax
from gcjax import gossip
from gcjax.gossip._simulate.events import event_simulation
from gcjax.gossip._simulate.nodes import make_trainer

DELAYS = {"blocking": 0.0, "non-blocking": 0.0, "delayed": 2.0}
EVENTS = 40  # of every schedule, so that each variant is compiled once


class Pairs:
    """A simulation of given events of least squares, one of `DELAYS`."""

    def __init__(self, variant, events, models=None):
        rows = [*zip(events.node, events.partner, *events.steps.T, events.meets, strict=True)]
        padded = events_of(*rows, *[(0, 0, 0, 0, False)] * (EVENTS - len(rows)))
        self.blocking, self.delay = variant == "blocking", DELAYS[variant]
        simulation = event_simulation(trainer(), padded, NODES, delay=self.delay, blocking=self.blocking, bits=None)
        self.plan, self.state, self.advance = simulation.plan, simulation.state, _advance(self.blocking)
        if models is not None:
            self.state = self.state._replace(models=np.concatenate([models] if self.blocking else [models, models]))

    def run(self, data, begin, end):
        self.state = self.advance(self.state, data, self.plan, begin, end)
        return self.state


@functools.cache
def _advance(blocking):
    events = random_events(1, 0)
    return jax.jit(event_simulation(trainer(), events, NODES, delay=0.0, blocking=blocking, bits=None).advance)


@pytest.mark.parametrize("variant", DELAYS)
def test_events_do_what_loops_do(variant):
    data, events = least_squares(), random_events(EVENTS, 1)
    start = np.random.default_rng(2).normal(size=(NODES, SIZE)).astype(np.float32)
    pairs, loops = Pairs(variant, events, start), Loops(data, start)
    slots = 2 if variant == "delayed" else 0  # a message arrives just in time for the second event after its own
    assert len(pairs.state.in_flight) == slots
    for e, (i, j, steps, meets, now) in enumerate(zip(*events, strict=True)):
        state = pairs.run(data, e, e + 1)
        if pairs.blocking:
            loops.meet_blocking(i, j, steps, meets)
        else:
            loops.meet_non_blocking(i, j, steps, meets, now, pairs.delay)
        seen = loops.live if pairs.blocking else np.concatenate([loops.live, loops.copy])
        np.testing.assert_allclose(state.models, seen, rtol=0, atol=2e-5, err_msg=f"event {e}")
    assert state.done.tolist() == [
        sum(s[k] for i, j, s, *_ in zip(*events, strict=True) for k in range(1 + pairs.blocking) if (i, j)[k] == node)
        for node in range(NODES)
    ]
    np.testing.assert_allclose(state.opt_state[0].trace, loops.speed, rtol=0, atol=2e-4)


@pytest.mark.parametrize("variant", DELAYS)
def test_events_keep_the_mean_of_all_models(variant):
    rng = np.random.default_rng(0)
    start = (rng.integers(-99, 99, (NODES, SIZE)) * 2.0**20).astype(np.float32)  # room for 20 exact halvings
    still = np.zeros((NODES, SAMPLES, SIZE), np.float32), np.zeros((NODES, SAMPLES), np.float32)  # no gradient
    pairs = Pairs(variant, random_events(12, 3), start)
    for e in range(12):
        state = pairs.run(still, e, e + 1)
        total = np.asarray(state.models, np.float64)[-NODES:].sum(0)
        if slots := len(state.in_flight):
            total += sum(
                np.asarray(state.in_flight, np.float64)[m % slots] for m in range(pairs.plan.arrived[e], e + 1)
            )
        np.testing.assert_array_equal(total, start.astype(np.float64).sum(0))
    assert not np.allclose(state.models[-NODES:], start, atol=0.1)


def test_non_blocking_is_blocking_when_nothing_is_late():
    # Both partners have put their local steps into the copies before they average, and both read the average at once.
    data, met = least_squares(), [(0, 1), (2, 3), (1, 2), (4, 5), (0, 5), (3, 4), (1, 5)]
    late = [e for i, j in met for e in ((i, i, 2, 0, 0), (j, j, 2, 0, 0), (i, j, 0, 0, 1), (j, j, 0, 0, 0))]
    waits = Pairs("blocking", events_of(*((i, j, 2, 2, True) for i, j in met))).run(data, 0, len(met))
    never = Pairs("non-blocking", events_of(*late)).run(data, 0, len(late))
    live, copies = np.split(np.asarray(never.models), 2)
    np.testing.assert_allclose(live, waits.models, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(live, copies)
    np.testing.assert_array_equal(never.done, waits.done)


def test_blocking_pairs_do_what_the_transform_does():
    steps, data = 2, least_squares()
    key = jax.random.key(2)
    average = gossip.swarm_average(local_steps=steps, key=key, axis_name="data")
    step = gcjax.make_train_step(loss_fn, optax.chain(optax.sgd(RATE, momentum=MOMENTUM), average), mesh_of(NODES))
    state = step.init(np.zeros(SIZE, np.float32))
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
    met = []
    for r in range(4):
        for _ in range(steps):
            state, _ = step(state, batch)
        met += [(i, j, steps, steps, True) for i, j in enumerate(partner_of(NODES, r, key)) if i < j]
    assert len(set(met)) > 3
    found = Pairs("blocking", events_of(*met)).run(data, 0, len(met))
    np.testing.assert_allclose(found.models, state.params.stacked(), rtol=0, atol=2e-6)
    assert np.ptp(found.models, axis=0).max() > 0.01


LARGE = 2000


@functools.cache
def on_lattice(blocking):
    """Pairs with 8 bits and models of `LARGE` entries that do not train."""
    nothing = np.zeros((NODES, 1), np.float32)
    start = np.zeros(LARGE, np.float32)
    program = make_trainer(lambda x, batch: x.sum(), start, optax.sgd(0.0), nothing, NODES, None, KEY)
    events = random_events(12, 3)
    simulation = event_simulation(program, events, NODES, delay=0.0, blocking=blocking, bits=8)
    advance = jax.jit(simulation.advance)
    return simulation, events, lambda state, begin, end: advance(state, nothing, simulation.plan, begin, end)


@pytest.mark.parametrize("blocking", [False, True])
def test_lattice_events_keep_the_mean(blocking):
    simulation, _, advance = on_lattice(blocking)
    start = np.random.default_rng(0).normal(size=(NODES, LARGE)).astype(np.float32)
    state = simulation.state._replace(models=np.concatenate([start] if blocking else [start, start]))
    for e in range(12):
        state = advance(state, e, e + 1)
        total = np.asarray(state.models, np.float64)[-NODES:].sum(0)
        np.testing.assert_allclose(total, start.astype(np.float64).sum(0), rtol=0, atol=2e-6)
    assert not np.allclose(state.models[-NODES:], start, atol=0.1)


@pytest.mark.parametrize("blocking", [False, True])
def test_lattice_error_is_within_its_bound(blocking):
    simulation, events, advance = on_lattice(blocking)
    first = int(np.flatnonzero(events.meets)[0])
    pair = np.array([events.node[first], events.partner[first]])
    rng = np.random.default_rng(1)
    start, distance = rng.normal(size=(NODES, LARGE)), np.zeros(NODES, np.float32)
    start[pair] = rng.normal(size=LARGE) + np.array([[0.0], [0.1]]) * rng.uniform(-1, 1, LARGE)
    start = start.astype(np.float32)
    distance[pair] = 0.1, 0.05

    def meet(start):
        models = np.concatenate([start] if blocking else [start, start])
        state = advance(simulation.state._replace(models=models, distance=distance), first, first + 1)
        return np.asarray(state.models)[-NODES:][pair], np.asarray(state.distance)[pair], int(state.resent)

    models, distances, resent = meet(start)
    assert resent == 0
    scales = [2.0 ** np.ceil(np.log2(2 * d / 126.5)) for d in (0.1, 0.05)]  # 8 bits decode within 126.5 scales
    error = np.abs(models - start[pair].mean(0))
    assert 0 < error.max() <= sum(scales) / 2 < 0.002
    seen = np.abs(start[pair[0]] - start[pair[1]]).max()
    assert np.all(np.abs(distances - max(seen, 0.09)) <= max(scales))
    # Far beyond the margin nothing wrong gets through, both models are sent in full, and the margin grows.
    start[pair[1]] *= 50
    models, distances, resent = meet(start)
    assert resent == 2
    np.testing.assert_allclose(models, np.tile(start[pair].mean(0), (2, 1)), rtol=1e-6)
    assert distances.min() > 50
