"""The gossip simulator: its algorithms against loops in NumPy, its clocks and bits counted by hand, and convergence."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from harness import mesh_of

import gcjax
from gcjax import gossip
from gcjax.gossip._graphs import mixing_matrix, neighbours
from gcjax.gossip._lattice import scale_for
from gcjax.gossip._matchings import matchings, rounds
from gcjax.gossip._simulate.clocks import Events, meetings, message_bits
from gcjax.gossip._simulate.events import MARGIN, pair_state, run_blocking, run_non_blocking, schedule
from gcjax.gossip._simulate.nodes import make_trainer
from gcjax.gossip._simulate.rounds import round_state, run_rounds

KEY = jax.random.key(5)
LINK = gcjax.Link(1e6, 1e-3, efficiency=1.0)
NODES, SAMPLES, SIZE = 6, 12, 3
rare = functools.partial(pytest.param, marks=pytest.mark.full)
RATE, MOMENTUM = 0.05, 0.5


def least_squares(nodes=NODES, seed=0):
    """Rows and targets of every node, each with a solution of its own."""
    rng = np.random.default_rng(seed)
    a = rng.normal(size=(nodes, SAMPLES, SIZE)).astype(np.float32)
    solutions = rng.normal(size=(nodes, SIZE, 1)) + 1
    return a, (a @ solutions)[..., 0].astype(np.float32)


def loss_fn(x, batch):
    a, b = batch
    return jnp.mean((a @ x - b) ** 2) / 2


def gradient(data, node, x):
    a, b = (leaf[node].astype(np.float64) for leaf in data)
    return a.T @ (a @ x - b) / SAMPLES


def run(**options):
    """A simulation of least squares; the metric is the mean model."""
    data = options.pop("data", None)
    data = least_squares(options.get("nodes", NODES)) if data is None else data
    given = {"nodes": NODES, "steps": 40, "evaluate": lambda x: x, "key": KEY, "moments": 2}
    tx = options.pop("tx", optax.sgd(RATE))
    return gossip.simulate(loss_fn, jnp.zeros(SIZE), data, tx, **(given | options))


def trainer_of(data, size=SIZE, tx=None, fn=loss_fn):
    tx = optax.sgd(RATE, momentum=MOMENTUM) if tx is None else tx
    return make_trainer(fn, jnp.zeros(size), tx, data, len(jax.tree.leaves(data)[0]), None, KEY)


def events_of(*rows, seconds=None):
    """Events from rows (node, partner, its steps, the partner's steps, whether they meet), a second apart."""
    node, partner, own, other, meets = np.array(rows).T
    seconds = np.arange(1.0, len(node) + 1) if seconds is None else np.array(seconds)
    steps = np.stack([own, other], 1).astype(np.int32)
    return Events(node.astype(np.int32), partner.astype(np.int32), steps, meets.astype(bool), seconds)


def random_events(count, nodes, seed):
    rng = np.random.default_rng(seed)
    pairs = [rng.choice(nodes, 2, replace=False) for _ in range(count)]
    return events_of(*([i, j, rng.integers(4), rng.integers(4), rng.random() < 0.8] for i, j in pairs))


class Loops:
    """Nodes in NumPy, float64, one after the other."""

    def __init__(self, data, models):
        self.data, self.live = data, np.array(models, np.float64)
        self.copy, self.speed = self.live.copy(), np.zeros_like(self.live)
        self.flying = []  # (arrives, node, what its copy gains)

    def train(self, i, steps):
        """This node's live model after so many steps with momentum; the momentum stays with the node."""
        x = self.live[i].copy()
        for _ in range(steps):
            self.speed[i] = MOMENTUM * self.speed[i] + gradient(self.data, i, x)
            x -= RATE * self.speed[i]
        return x

    def block(self, i, j, steps, meets):
        self.live[i], self.live[j] = self.train(i, steps[0]), self.train(j, steps[1])
        if meets:
            self.live[i] = self.live[j] = (self.live[i] + self.live[j]) / 2

    def pass_by(self, i, j, steps, meets, now, delay):
        for arrives, node, gain in [m for m in self.flying if m[0] <= now]:
            self.copy[node] += gain
            self.flying.remove((arrives, node, gain))
        update = self.train(i, steps[0]) - self.live[i]
        mean = (self.copy[i] + self.copy[j]) / 2 if meets else self.copy[i]
        gain = mean - self.copy[j] if meets else 0 * mean
        if delay:
            self.flying.append((now + delay, j, gain))
        else:
            self.copy[j] = self.copy[j] + gain
        self.copy[i] = self.live[i] = mean + update


@pytest.mark.parametrize("variant", ["blocking", "non-blocking", "delayed"])
def test_the_events_are_those_of_loops_in_numpy(variant):
    data, events = least_squares(), random_events(40, NODES, 1)
    trainer, delay = trainer_of(data), 2.0 if variant == "delayed" else 0.0
    plan, slots = schedule(events, delay)
    assert slots == (2 if delay else 0)  # a message arrives just in time for the second event after its own
    blocking = variant == "blocking"
    start = np.random.default_rng(2).normal(size=(NODES, SIZE)).astype(np.float32)
    state = pair_state(trainer, NODES, blocking=blocking, slots=slots)
    state = state._replace(models=jnp.concatenate([start] if blocking else [start, start]))
    step = jax.jit(functools.partial(run_blocking if blocking else run_non_blocking, trainer, None))
    loops = Loops(data, start)
    for e, (i, j, steps, meets, now) in enumerate(zip(*events, strict=True)):
        state = step(state, data, plan, e, e + 1)
        loops.block(i, j, steps, meets) if blocking else loops.pass_by(i, j, steps, meets, now, delay)
        seen = loops.live if blocking else np.concatenate([loops.live, loops.copy])
        np.testing.assert_allclose(state.models, seen, rtol=0, atol=2e-5, err_msg=f"event {e}")
    assert state.done.tolist() == [
        sum(s[k] for i, j, s, *_ in zip(*events, strict=True) for k in range(1 + blocking) if (i, j)[k] == node)
        for node in range(NODES)
    ]
    trace = state.opt_state[0].trace
    np.testing.assert_allclose(trace, loops.speed, rtol=0, atol=2e-4)


@pytest.mark.parametrize("variant", ["blocking", "non-blocking", "delayed", "8 bits"])
def test_no_event_changes_the_mean_of_all_models(variant):
    nodes, size = 6, 40
    trainer = trainer_of(np.zeros((nodes, 1)), size, optax.sgd(0.0), lambda x, batch: jnp.sum(x) * jnp.mean(batch))
    rng = np.random.default_rng(0)
    start = (rng.integers(-99, 99, (nodes, size)) * 2.0**20).astype(np.float32)  # room for 20 halvings, exactly
    bits = 8 if variant == "8 bits" else None
    if bits:
        start = rng.normal(size=(nodes, size)).astype(np.float32)
    events = random_events(12, nodes, 3)
    plan, slots = schedule(events, 2.5 if variant == "delayed" else 0.0)
    blocking = variant == "blocking"
    state = pair_state(trainer, nodes, blocking=blocking, slots=slots)
    state = state._replace(models=jnp.concatenate([start] if blocking else [start, start]))
    step = jax.jit(functools.partial(run_blocking if blocking else run_non_blocking, trainer, bits))
    for e in range(12):
        state = step(state, np.zeros((nodes, 1)), plan, e, e + 1)
        total = np.asarray(state.models, np.float64)[-nodes:].sum(0)
        on_the_way = range(int(plan.arrived[e]), e + 1) if slots else ()
        total += sum((np.asarray(state.flying, np.float64)[m % slots] for m in on_the_way), np.zeros(size))
        np.testing.assert_allclose(total, start.astype(np.float64).sum(0), rtol=0, atol=2e-6 if bits else 0)
    assert not np.allclose(state.models[-nodes:], start, atol=0.1)


def test_non_blocking_is_blocking_when_nothing_is_late():
    # Both partners have put their local steps into the copies before they average, and both read the average at once.
    data, met = least_squares(), [(0, 1), (2, 3), (1, 2), (4, 5), (0, 5), (3, 4), (1, 5)]
    trainer = trainer_of(data)
    blocking, _ = schedule(events_of(*((i, j, 2, 2, True) for i, j in met)), 0.0)
    late = [e for i, j in met for e in ((i, i, 2, 0, 0), (j, j, 2, 0, 0), (i, j, 0, 0, 1), (j, j, 0, 0, 0))]
    punctual, _ = schedule(events_of(*late), 0.0)
    waits = pair_state(trainer, NODES, blocking=True, slots=0)
    waits = jax.jit(functools.partial(run_blocking, trainer, None))(waits, data, blocking, 0, len(met))
    never = pair_state(trainer, NODES, blocking=False, slots=0)
    never = jax.jit(functools.partial(run_non_blocking, trainer, None))(never, data, punctual, 0, len(late))
    live, copies = np.split(np.asarray(never.models), 2)
    np.testing.assert_allclose(live, waits.models, rtol=0, atol=1e-6)
    np.testing.assert_array_equal(live, copies)
    np.testing.assert_array_equal(never.done, waits.done)


@pytest.mark.parametrize("algorithm", ["d_psgd", "sgp", "local_sgd", "allreduce"])
@pytest.mark.parametrize("drop", [0.0, 0.3])
def test_rounds_are_those_of_loops_in_numpy(algorithm, drop):
    if drop and algorithm in ("local_sgd", "allreduce"):
        return  # they send again what is lost: see the test of bits and seconds
    data, steps = least_squares(), 1 if algorithm == "allreduce" else 2
    trainer = trainer_of(data)
    plan = {"d_psgd": mixing_matrix("ring", NODES), "sgp": rounds("exponential", NODES)}.get(algorithm)
    plan = None if plan is None else jnp.asarray(plan, jnp.float32 if algorithm == "d_psgd" else jnp.int32)
    state = round_state(trainer, NODES, algorithm)
    step = jax.jit(functools.partial(run_rounds, trainer, algorithm, steps, drop))
    loops, weight, common = Loops(data, np.zeros((NODES, SIZE))), np.ones(NODES), np.zeros(SIZE)
    x, kept = np.zeros((NODES, SIZE)), 0
    for r in range(6):
        state = step(state, data, plan, r, r + 1)
        fails = np.asarray(jax.random.uniform(jax.random.fold_in(jax.random.fold_in(KEY, 1 << 30), r), _shape(plan)))
        fails = fails < drop
        if algorithm == "allreduce":
            loops.speed[0] = MOMENTUM * loops.speed[0] + sum(gradient(data, i, common) for i in range(NODES)) / NODES
            common = common - RATE * loops.speed[0]
            np.testing.assert_allclose(state.models, common, rtol=0, atol=1e-5)
            continue
        loops.live = x / weight[:, None] if algorithm == "sgp" else x.copy()
        updates = [loops.train(i, steps) - loops.live[i] for i in range(NODES)]
        if algorithm == "local_sgd":
            x = np.tile((x + updates).mean(0), (NODES, 1))
            np.testing.assert_allclose(state.models, x[0], rtol=0, atol=1e-5)
        elif algorithm == "d_psgd":
            new = np.zeros_like(x)
            for i in range(NODES):
                for j in ((i - 1) % NODES, (i + 1) % NODES):
                    source = i if fails[min(i, j), max(i, j)] else j
                    kept += source == i
                    new[i] += x[source] / 3
                new[i] += x[i] / 3 + updates[i]
            x = new
            np.testing.assert_allclose(state.models, x, rtol=0, atol=1e-5)
        else:
            x, new, heavier = x + updates, np.zeros_like(x), np.zeros(NODES)
            for i in range(NODES):
                to = i if fails[i] else int(plan[r % 3, i])
                kept += to == i
                for receiver in (i, to):
                    new[receiver] += x[i] / 2
                    heavier[receiver] += weight[i] / 2
            x, weight = new, heavier
            np.testing.assert_allclose(state.models, x, rtol=0, atol=1e-5)
            np.testing.assert_allclose(state.weight, weight, rtol=0, atol=1e-6)
            assert abs(float(state.weight.sum()) - NODES) < 1e-5
    assert bool(kept) == bool(drop)
    assert algorithm != "sgp" or (np.ptp(weight) > 0.1) == bool(drop)


def _shape(plan):
    return () if plan is None else plan.shape if plan.dtype == jnp.float32 else plan.shape[1:]


def test_eight_bits_are_within_the_lattices_bound_of_full_precision():
    size = 2000
    trainer = trainer_of(np.zeros((2, 1)), size, optax.sgd(0.0), lambda x, batch: jnp.sum(x) * jnp.mean(batch))
    rng = np.random.default_rng(1)
    start = rng.normal(size=size) + np.array([[0.0], [0.1]]) * rng.uniform(-1, 1, size)
    start = start.astype(np.float32)
    plan, _ = schedule(events_of((0, 1, 0, 0, 1)), 0.0)
    state = pair_state(trainer, 2, blocking=True, slots=0)
    state = state._replace(models=jnp.asarray(start), distance=jnp.array([0.1, 0.05]))
    meet = jax.jit(functools.partial(run_blocking, trainer, 8))
    found = meet(state, np.zeros((2, 1)), plan, 0, 1)
    assert int(found.resent) == 0
    scales = [float(scale_for(MARGIN * d, 8)) for d in (0.1, 0.05)]
    error = np.abs(np.asarray(found.models) - start.mean(0))
    assert 0 < error.max() <= sum(scales) / 2 < 0.002
    seen = np.abs(start[0] - start[1]).max()
    assert np.all(np.abs(found.distance - max(seen, 0.09)) <= max(scales))
    # Far beyond the margin: nothing wrong gets through, both are sent in full, and the margin has learnt.
    far = state._replace(models=jnp.asarray(start * np.array([[1], [50]], np.float32)))
    found = meet(far, np.zeros((2, 1)), plan, 0, 1)
    assert int(found.resent) == 2
    np.testing.assert_allclose(found.models, np.tile(far.models.mean(0), (2, 1)), rtol=1e-6)
    assert float(found.distance.min()) > 50


def poisson(world, nodes=64, gradients=20_000, **options):
    given = {"local_steps": 2, "geometric": False, "blocking": False, "bits": 0, "rng": np.random.default_rng(0)}
    return meetings(world, neighbours("complete", nodes), gradients, **(given | options))


@pytest.mark.parametrize("geometric", [False, True])
def test_clocks_are_poisson_and_as_fast_as_their_nodes(geometric):
    fast = 64 * [0.01]
    fast[5] = 0.05
    world = gossip.World(gcjax.Link(1e12, 0.0), tuple(fast))
    events = poisson(world, gradients=60_000, geometric=geometric)
    counts = np.bincount(events.node, minlength=64)
    fifth = np.delete(counts, 5).mean() / 5
    assert abs(counts[5] - fifth) < 5 * fifth**0.5
    gaps = np.concatenate([np.diff(events.seconds[events.node == i]) for i in range(64) if i != 5])
    # An exponential law's mean and deviation are equal; 5 standard errors.
    assert abs(gaps.mean() - 0.02) < 5 * 0.02 / len(gaps) ** 0.5
    assert abs(gaps.std() - 0.02) < 5 * 0.02 * (2 / len(gaps)) ** 0.5 * 2
    assert np.all(np.diff(events.seconds) >= 0)
    assert not (events.node == events.partner).any()
    chosen = np.bincount(events.partner, minlength=64)
    assert np.abs(chosen - len(events.node) / 64).max() < 5 * (len(events.node) / 64) ** 0.5
    own = events.steps[:, 0]
    assert own.sum() + events.steps[:, 1].sum() >= 60_000 > own[:-64].sum()
    if geometric:
        assert abs(own.mean() - 2) < 0.1
        assert abs((own == 1).mean() - 0.5) < 0.03
    else:
        assert (own == 2).all()


def test_a_straggler_holds_up_rounds_and_blocking_pairs_but_nobody_else():
    even, slow = gossip.World(LINK), gossip.World(LINK, (0.2, *[0.01] * 15))
    ends = {}
    for name, options in {"non-blocking": {}, "blocking": {"blocking": True}}.items():
        ends[name] = [poisson(w, 16, 4000, bits=320, **options) for w in (even, slow)]
    rates = [[np.delete(np.bincount(e.node, minlength=16), 0).mean() / e.seconds[-1] for e in ends[n]] for n in ends]
    assert abs(rates[0][1] / rates[0][0] - 1) < 0.05
    assert rates[1][1] / rates[1][0] < 0.5
    waited = ends["blocking"][0]
    for k in range(16):  # whoever has met somebody begins its local steps afresh
        gaps = np.diff(waited.seconds[(waited.node == k) | (waited.partner == k)])
        assert gaps.min() > 0.00132 - 1e-9
        assert gaps.mean() > 0.02
    each = 0.01 + LINK.seconds(gcjax._comm.simulated.Transfer("all_reduce", 4 * SIZE), NODES)
    assert np.isclose(run(algorithm="allreduce", world=gossip.World(LINK)).seconds[-1], 40 * each)
    curves = run(algorithm="allreduce", world=gossip.World(LINK, (0.05, *[0.01] * 5)))
    assert np.isclose(curves.seconds[-1], 40 * (each + 0.04))
    assert curves.steps.tolist() == [40] * NODES


def test_bits_and_seconds_are_those_counted_by_hand():
    world = gossip.World(LINK, delay=0.002)
    model, n = 32 * SIZE, NODES
    pair = 0.003 + model / 1e6
    for options, bits, seconds in [
        ({"algorithm": "d_psgd"}, 2 * model, 2 * pair),
        ({"algorithm": "d_psgd", "graph": "complete"}, 5 * model, 5 * pair),
        ({"algorithm": "sgp"}, model + 32, pair),
        ({"algorithm": "allreduce"}, 2 * (n - 1) / n * model, 3 * pair),
        ({"algorithm": "local_sgd", "local_steps": 2}, (n - 1) / n * model, 1.5 * pair),
    ]:
        curves = run(world=world, **options)
        assert np.allclose(curves.bits, bits * curves.gradients), options
        assert np.allclose(curves.seconds, (0.01 + seconds) * curves.gradients), options
    lossy = run(world=world._replace(drop=0.5), algorithm="allreduce")
    assert np.isclose(lossy.bits[-1], 2 * run(world=world, algorithm="allreduce").bits[-1])
    assert np.isclose(lossy.seconds[-1], 40 * (0.01 + 6 * pair))
    curves = run(world=world)
    assert np.array_equal(curves.bits, 2 * model * curves.events / n)
    assert curves.gradients.tolist() == [0.0, 20.0, 40.0]
    # A checksum, a scale and 8 masks of 1024 bits for a message; in full 96 bits more for each that is sent again.
    curves = run(bits=8)
    assert message_bits(SIZE, 8) == 32 + 32 + 8 * 1024
    assert curves.resent[-1] > 0
    assert np.allclose(curves.bits, (2 * (64 + 8192) * curves.events + model * curves.resent) / n)


def test_exchanges_that_fail_leave_both_as_they_are_and_still_cost_bits():
    always, never = run(nodes=2), run(nodes=2, world=gossip.World(drop=1 - 1e-12))
    data = least_squares(2)
    alone = [np.zeros(SIZE), np.zeros(SIZE)]
    for i, steps in enumerate(never.steps):
        for _ in range(steps):
            alone[i] = alone[i] - RATE * gradient(data, i, alone[i])
    np.testing.assert_allclose(never.params, np.mean(alone, 0), rtol=0, atol=1e-5)
    np.testing.assert_allclose(never.consensus_distance[-1], np.linalg.norm(alone[0] - alone[1]) / 2, rtol=1e-4)
    assert never.bits[-1] == 64 * SIZE * never.events[-1] / 2
    assert always.consensus_distance[-1] < 0.2 * never.spread[-1]
    events = poisson(gossip.World(drop=0.3))
    assert abs(events.meets.mean() - 0.7) < 5 * (0.21 / len(events.meets)) ** 0.5


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ("swarm", {"graph": "ring"}),
        rare("swarm", {"graph": "torus", "blocking": True, "local_steps": 2, "geometric": True}),
        ("swarm", {"graph": "complete", "bits": 8, "local_steps": 2}),
        ("swarm", {"world": gossip.World(step_seconds=(0.02, *[0.01] * 8), delay=0.01, drop=0.1)}),
        rare("ad_psgd", {"graph": "torus"}),
        rare("d_psgd", {"graph": "ring"}),
        ("d_psgd", {"graph": "torus", "world": gossip.World(drop=0.2)}),
        ("sgp", {"world": gossip.World(drop=0.2)}),
        rare("local_sgd", {"local_steps": 4}),
        rare("allreduce", {}),
    ],
)
def test_nodes_with_different_data_come_to_the_solution_of_all_data(algorithm, options):
    nodes = 9
    a, b = least_squares(nodes)
    best = np.linalg.lstsq(a.reshape(-1, SIZE).astype(np.float64), b.ravel(), rcond=None)[0]
    count = 4000 if algorithm in ("swarm", "ad_psgd") else 1000
    tx = optax.sgd(lambda k: 0.2 / (1 + k / 20))  # falls as 1 / k: who makes fewer steps makes larger ones
    curves = run(data=(a, b), nodes=nodes, steps=count, algorithm=algorithm, tx=tx, **options)
    apart = np.linalg.norm(least_squares(nodes)[1] - (a @ best), axis=1).min()
    assert apart > 0.3  # no node's own solution is that of all
    distances = np.linalg.norm(curves.metrics - best, axis=1)
    assert distances[0] > 1
    assert distances[-1] < 0.04, distances
    assert curves.consensus_distance[-1] < 0.05


def test_blocking_pairs_are_the_matchings_of_the_transform_on_a_mesh():
    workers, steps, data = 4, 2, least_squares(4)
    tx = optax.sgd(RATE, momentum=MOMENTUM)
    key = jax.random.key(2)
    chain = optax.chain(tx, gossip.swarm_average(local_steps=steps, key=key, axis_name="data"))
    step = gossip.make_train_step(loss_fn, chain, mesh_of(workers), axis_name="data")
    state = step.init(jnp.zeros(SIZE))
    batch = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
    family, met = matchings("complete", workers), []
    for r in range(4):
        for _ in range(steps):
            state, _ = step(state, batch)
        partners = family[int(jax.random.randint(jax.random.fold_in(key, r), (), 0, len(family)))]
        met += [(i, j, steps, steps, True) for i, j in enumerate(partners) if i < j]
    assert len(set(met)) > 2
    trainer = trainer_of(data)
    plan, _ = schedule(events_of(*met), 0.0)
    found = pair_state(trainer, workers, blocking=True, slots=0)
    found = jax.jit(functools.partial(run_blocking, trainer, None))(found, data, plan, 0, len(met))
    np.testing.assert_allclose(found.models, state.params.stacked(), rtol=0, atol=2e-6)
    assert np.ptp(found.models, axis=0).max() > 0.01


def test_the_same_key_gives_the_same_curves_and_another_key_others():
    options = {"batch_size": 4, "world": gossip.World(drop=0.1, delay=0.01)}
    first, again, other = run(**options), run(**options), run(**options, key=jax.random.key(6))
    for x, y in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(x, y)
    assert not np.array_equal(first.params, other.params)
    assert not np.array_equal(first.seconds, other.seconds)


def test_the_batches_of_a_node_are_drawn_from_its_own_samples_alone():
    data = np.repeat(np.arange(4.0), 50).reshape(4, 50) + np.linspace(0, 0.9, 50)
    trainer = make_trainer(None, jnp.zeros(1), None, data, 4, 400, KEY)
    found = np.array([[trainer.batch(jnp.asarray(data), node, step) for step in range(2)] for node in range(4)])
    assert (found.astype(int) == np.arange(4)[:, None, None]).all()
    chosen = np.round((found - np.arange(4)[:, None, None]) * 49 / 0.9).astype(int)
    assert len({tuple(draw) for draw in chosen.reshape(8, -1)}) == 8
    assert np.abs(np.bincount(chosen.ravel(), minlength=50) - 64).max() < 5 * 8


@pytest.mark.parametrize("algorithm", ["swarm", "d_psgd", "sgp", rare("ad_psgd"), rare("local_sgd"), rare("allreduce")])
def test_one_node_alone_takes_plain_steps_and_sends_nothing(algorithm):
    data, x = least_squares(1), np.zeros(SIZE)
    for _ in range(10):
        x = x - RATE * gradient(data, 0, x)
    curves = run(nodes=1, steps=10, algorithm=algorithm)
    np.testing.assert_allclose(curves.params, x, rtol=0, atol=1e-5)
    assert curves.bits[-1] == 0
    assert curves.steps.tolist() == [10]


def test_progress_is_told_and_metrics_may_be_any_tree():
    told = []
    curves = run(evaluate=lambda x: {"norm": jnp.linalg.norm(x)}, moments=4, progress=lambda *at: told.append(at))
    assert told == [(int(e), int(curves.events[-1])) for e in curves.events]
    assert len(told) == 5
    assert curves.metrics["norm"].shape == (5,)
    assert np.isclose(curves.metrics["norm"][-1], np.linalg.norm(curves.params))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nodes": 0}, "nodes must be at least 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"algorithm": "gossip"}, "algorithm must be one of 'swarm'"),
        ({"local_steps": 0}, "local_steps must be at least 1, got 0"),
        ({"bits": 3}, "bits must be from 4 to 16, got 3"),
        ({"algorithm": "d_psgd", "bits": 8}, "options of algorithm='swarm'"),
        ({"algorithm": "ad_psgd", "local_steps": 2}, "take 'swarm'"),
        ({"algorithm": "allreduce", "local_steps": 2}, "take 'local_sgd'"),
        ({"algorithm": "local_sgd", "graph": "ring"}, "leave graph out"),
        ({"graph": [(0, 1), (2, 3), (4, 5)]}, "not connected"),
        ({"graph": "exponential"}, "must be undirected"),
        ({"graph": "exponential", "algorithm": "d_psgd"}, "must be undirected"),
        ({"data": np.zeros((4, 5))}, r"has shape \(4, 5\); it must begin with \(6 nodes, samples\)"),
        ({"data": (np.zeros((6, 5)), np.zeros((6, 4)))}, r"same number of samples per node, got \[4, 5\]"),
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"world": gossip.World(step_seconds=(1.0, 2.0))}, "6 of them, one for every node"),
        ({"world": gossip.World(step_seconds=0.0)}, r"step_seconds must be in \(0, inf\)"),
        ({"world": gossip.World(drop=1.0)}, r"drop must be in \[0, 1\)"),
        ({"world": gossip.World(delay=-1.0)}, "delay must be in"),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)


def test_things_of_the_wrong_kind_are_named():
    with pytest.raises(TypeError, match=r"link must be a gcjax\.Link, got '1Gbit'"):
        run(world=gossip.World("1Gbit"))
    with pytest.raises(TypeError, match="key must be a key made by"):
        run(key=0)
    with pytest.raises(TypeError, match=r"params leaf .* must be floating point, got int32"):
        gossip.simulate(
            loss_fn, jnp.zeros(3, int), least_squares(), optax.sgd(1.0), nodes=6, steps=1, evaluate=id, key=KEY
        )


def test_the_doctest_runs():
    import doctest
    import sys

    result = doctest.testmod(sys.modules["gcjax.gossip._simulate.api"])
    assert result.attempted > 3
    assert not result.failed
