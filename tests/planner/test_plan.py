"""The planner: messages as real runs send them, times as calculated by hand, advice that is honest."""

import dataclasses
import doctest
import json
import math
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import Runner, limited_buckets
from rows import SHAPES, methods

import gcjax
from gcjax._comm import collectives, simulated
from gcjax._comm.simulated import Transfer, model_of, ring_bytes, transfers_of
from gcjax._planner import costs
from gcjax._planner.network import as_count, as_link, as_seconds, rate_text

PARAMS = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
WORKERS = 8
STANDARD = costs.standard_methods(0.01)
COSTS = {name: gcjax.Cost(1e-3, 1e-9, 1e-9) for name in STANDARD} | {"dense float32": gcjax.Cost(1e-3, 1e-9, 0)}
MAIN = ["variance", "variance (reduce_scatter)", "top_k", "power_sgd rank 2"]


def plan(params="25.6M", workers=16, link="1Gbit", step_time=0.3, *, methods=MAIN, costs=COSTS, **options):
    return gcjax.plan(params, workers, link, step_time, methods=methods, costs=costs, **options)


def row_of(plan, method):
    return next(row for row in plan.rows if row.method == method)


def real_bytes(row):
    """What the collectives of a real step over 8 workers move, by its largest branch: traced, not run."""
    comms = []

    def listened(comm):
        branches = []
        comms.append((comm, branches))

        def metered():
            branch = comm.metered()
            branches.append(branch)
            return branch

        return dataclasses.replace(comm, metered=metered)

    runner = Runner(row.make("data"), PARAMS, WORKERS)
    stacked = {name: np.zeros((WORKERS, *shape), np.float32) for name, shape in SHAPES.items()}
    with collectives.replaced_comm(lambda *axes: listened(collectives.mesh_comm(*axes))):
        jax.eval_shape(runner._step, runner.state, stacked, stacked if row.uses_squares else None)
    comm, branches = comms[-1]
    return comm.bytes_moved() + max((branch.bytes_moved() for branch in branches), default=0)


@pytest.mark.parametrize("row", methods(), ids=lambda row: row.name)
def test_the_messages_are_those_of_a_real_step(row):
    messages = transfers_of(row.make(None), PARAMS, WORKERS, row.uses_squares)
    assert sum(ring_bytes(message, WORKERS) for message in messages) == pytest.approx(real_bytes(row))


@pytest.mark.parametrize("name", ["variance-overflow", "onebit", "dense-float32", "random_k-entries"])
def test_the_messages_add_up_to_the_bytes_that_info_reports(name):
    row = next(row for row in methods() if row.name.startswith(name))
    runner = Runner(row.make("data"), PARAMS, WORKERS)
    rng = np.random.default_rng(0)
    gradient = {key: rng.normal(size=(WORKERS, *shape)).astype(np.float32) for key, shape in SHAPES.items()}
    runner.step(gradient)
    messages = transfers_of(row.make(None), PARAMS, WORKERS, False)
    wire = gcjax.info(runner.state).wire_bytes
    assert sum(ring_bytes(message, WORKERS) for message in messages) == pytest.approx(wire)


def test_of_a_ladder_the_largest_capacity_counts_in_every_bucket():
    tx = gcjax.variance_compress(capacity=(32, 64))
    once = transfers_of(tx, jnp.zeros(1024), 4, True)
    with limited_buckets(512):
        twice = transfers_of(tx, jnp.zeros(1024), 4, True)
    assert [m for m in once if m.kind == "all_gather"] == [Transfer("all_gather", 4 * (1 + 1 + 64))]
    assert [m for m in twice if m.kind == "all_gather"] == [Transfer("all_gather", 4 * (1 + 1 + 64))] * 2


def test_each_choice_between_exchanges_counts_once():
    small, large, other = (Transfer("all_gather", size) for size in (1, 2, 3))
    record = [other, [small], [large], other, other, [large, [other], [small]]]
    assert simulated._with_largest_branches(record, 2) == (other, large, other, other, large, other)


def test_outside_of_the_planner_a_transform_without_axes_has_one_worker():
    tx = gcjax.dense_compress()
    transfers_of(tx, jnp.zeros(4), 5, False)
    updates, state = tx.update(jnp.ones(4), tx.init(jnp.ones(4)))
    np.testing.assert_array_equal(updates, 1)
    assert gcjax.info(state).wire_bytes == 0


def test_an_imitated_step_decodes_the_payloads_of_all_workers():
    tx = gcjax.top_k_compress(0.5)
    gradient = jnp.asarray([3.0, -1.0, 2.0, 0.5])

    @jax.jit
    def step(zeros):
        with simulated.simulated_workers(3, zeros, []):
            return tx.update(gradient, tx.init(gradient))[0]

    np.testing.assert_allclose(step(jnp.zeros(3, jnp.int32)), [3, 0, 2, 0], rtol=1e-6)
    # The third worker's payload, words of uint32, begins with how many entries it has.
    assert step(jnp.asarray([0, 0, -1]))[2] < 2


def test_every_public_method_is_planned():
    exported = {name.removesuffix("_compress") for name in gcjax.__all__ if name.endswith("_compress")}
    assert {name.split()[0] for name in STANDARD} == exported


def test_a_size_stands_for_square_matrices():
    assert [x.shape for x in model_of(2_003_005)] == [(1000, 1000), (1000, 1000), (3, 1000), (5,)]
    assert [x.shape for x in model_of(30)] == [(5, 5), (1, 5)]


# 8 Mbit without headers carry 1 byte per microsecond.
SLOW = gcjax.Link(8e6, latency=0.001, efficiency=1.0)


@pytest.mark.parametrize(
    ("kind", "size", "workers", "milliseconds"),
    [
        ("all_reduce", 80_000, 8, 2 * 3 * 1 + 2 * 7 / 8 * 80),
        ("all_reduce", 4, 8, 3 * (1 + 0.004)),
        ("maximum", 4, 8, 3 * (1 + 0.004)),
        ("all_gather", 80_000, 8, 3 * 1 + 7 * 80),
        ("all_gather", 80_000, 5, 3 * 1 + 4 * 80),
        ("all_to_all", 80_000, 8, 7 * 1 + 7 / 8 * 80),
        ("all_to_all", 800, 8, 3 * (1 + 0.4)),
        ("all_gather", 80_000, 1, 0),
    ],
)
def test_times_of_collectives_calculated_by_hand(kind, size, workers, milliseconds):
    assert 1e3 * SLOW.seconds(Transfer(kind, size), workers) == pytest.approx(milliseconds)


def test_headers_take_their_share_of_the_link():
    assert gcjax.Link(8e6, 0.0).seconds(Transfer("all_gather", 1000), 2) == pytest.approx(1e-3 * 1514 / 1448)


def test_a_dense_step_calculated_by_hand():
    found = plan("1M", 4, SLOW, 0.5, methods=[], costs={"dense float32": gcjax.Cost(0.01, 2e-9, 5e-9)})
    wire = 2 * (2 * 0.001 + 3 / 4 * 4.0) + 2 * (0.001 + 4e-6)  # the gradient, and a maximum of 4 bytes
    assert found.dense.compute == pytest.approx(0.01 + 0.002 + 5e-9 * 4_000_004)
    assert found.dense.wire == pytest.approx(wire)
    assert found.dense.step == pytest.approx(0.5 + found.dense.compute + wire)
    assert found.half == pytest.approx(found.dense.step - 3.0 - 2 * 2e-6)


def test_two_levels_calculated_by_hand():
    fast = gcjax.Link(8e9, latency=0.0, efficiency=1.0)
    found = plan("1M", 8, SLOW, 0.5, methods=["variance"], inner_workers=4, inner_link=fast)
    row = row_of(found, "variance 1/100")
    payload = 4 * (1 + 1 + 10_016)  # count, a scale, the entries in whole 32
    assert row.wire_bytes == pytest.approx(payload + 2 * 4)
    between = 0.001 + payload / 1e6 + 2 * (0.001 + 4e-6)
    inside = 2 * (2 * 3 / 4 * 4e6) / 1e9 + 3 * (2 * payload // 4) / 1e9  # gradient and squares; putting together
    assert row.wire == pytest.approx(between + inside, rel=1e-6)
    inside = (2 * 3 / 4 * 4e6 + 3 * 1e6) / 1e9
    assert found.dense.wire == pytest.approx((0.001 + 4.0) + (0.001 + 4e-6) + inside, rel=1e-6)


def test_hosts_without_neighbours_only_use_the_inner_link():
    found = plan(workers=8, inner_workers=8, inner_link="300Gbit")
    assert {row.wire_bytes for row in found.rows} == {0}
    assert found.at("1kbit").dense.step == found.dense.step > 0.3


def test_a_quicker_link_never_makes_a_step_longer():
    found = plan()
    names = [row.method for row in found.rows]
    plans = [found.at(link) for link in ("10Mbit", "100Mbit", "1Gbit", "10Gbit", "1Tbit")]
    steps = np.asarray([[row_of(other, name).step for name in names] for other in plans])
    assert (np.diff(steps, axis=0) < 0).all()


def test_at_the_break_even_a_method_and_the_dense_mean_are_equal():
    found = plan()
    for row in found.rows:
        if row is not found.dense:
            for factor, pays in ((0.999, True), (1.001, False)):
                other = found.at(factor * row.break_even)
                assert (row_of(other, row.method).step < other.dense.step) == pays


def test_methods_that_always_and_never_pay_say_so():
    costs = COSTS | {"onebit": gcjax.Cost(0, 0, 0), "qsgd 4 bits": gcjax.Cost(1, 0, 0)}
    found = plan(workers=256, methods=["onebit", "qsgd 4 bits"], costs=costs, latency=0)
    assert row_of(found, "onebit").break_even == math.inf
    assert row_of(found, "qsgd 4 bits").break_even == 0.0  # 255 messages of an eighth of the gradient
    assert "always" in str(found)
    assert "never" in str(found)


def test_the_rows_are_sorted_and_the_best_is_not_the_dense_mean():
    found = plan()
    assert [row.step for row in found.rows] == sorted(row.step for row in found.rows)
    assert found.best is found.rows[0]
    assert found.best.speedup == pytest.approx(found.dense.step / found.best.step)
    fast = found.at("10Tbit")
    assert fast.rows[0] is fast.dense is not fast.best


def test_the_traffic_of_owners_does_not_grow_with_the_workers_as_that_of_a_gather_does():
    few, many = (plan(workers=workers) for workers in (8, 64))
    ratio = [row_of(many, name).wire_bytes / row_of(few, name).wire_bytes
             for name in ("variance 1/100", "variance 1/100 (reduce_scatter)")]  # fmt: skip
    assert ratio[0] == pytest.approx(9, rel=1e-3)
    assert ratio[1] < 1.2


def test_messages_of_65536_workers_take_no_memory():
    found = plan(workers=65_536, methods=[*MAIN, "sign_vote"])
    assert row_of(found, "variance 1/100").arriving_bytes > 60e9
    assert "*" in str(found)


def test_the_advice_follows_the_numbers():
    found = plan(methods=["variance"])
    assert found.at("10Tbit").advice.startswith("Do not compress: the best, variance 1/100, is slower than dense")
    nearly = found.at(0.98 * found.best.break_even).advice
    assert nearly.startswith("Do not compress: the best, variance 1/100, saves 0.")
    assert found.advice.startswith(
        f"variance 1/100 takes {1e3 * found.best.step:.0f} ms a step, dense float32 1.93 s, "
    )
    assert "accuracy" in found.advice
    slow = COSTS | {"variance": gcjax.Cost(0.7, 0, 0)}
    assert plan(link="1Gbit", methods=["variance"], costs=slow).advice.startswith("A float16 all-reduce will do")


def test_the_density_decides_what_sparse_methods_send():
    found = plan(methods=["variance", "onebit"], density=1 / 500)
    assert row_of(found, "variance 1/500").wire_bytes == pytest.approx(15 * 4 * 25.6e6 / 500, rel=0.01)
    assert row_of(found, "onebit").wire_bytes == pytest.approx(15 * 25.6e6 / 8 / 8, rel=0.1)
    assert row_of(plan(density=0.03, methods=["top_k"]), "top_k 0.03")


def test_own_methods_are_planned_beside_the_dense_mean():
    own = {"mine": gcjax.Method(lambda parameters: gcjax.power_sgd_compress(3, key=jax.random.key(0)))}
    found = plan({"w": jnp.zeros((300, 200)), "b": jnp.zeros(200)}, methods=own, costs=COSTS | {"mine": (0, 0, 0)})
    assert {row.method for row in found.rows} == {"mine", "dense float32"}
    assert found.setting.parameters == 60_200
    assert row_of(found, "mine").messages[1:] == (
        Transfer("all_reduce", 4 * (3 * 300 + 200)),
        Transfer("all_reduce", 4 * 3 * 200),
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"link": "fast"}, r"link must be a speed such as \"1Gbit\".*'fast'"),
        ({"link": "1Gbyte"}, "link"),
        ({"link": 0}, "link must be above 0"),
        ({"step_time": "soon"}, r"step_time must be a time such as \"0.3s\".*'soon'"),
        ({"step_time": -1}, "step_time must be at least 0"),
        ({"latency": "1 hour"}, "latency"),
        ({"params": "many"}, r"params must be a number such as \"25.6M\".*'many'"),
        ({"params": 0}, "params must be above 0"),
        ({"params": 10.5}, "params must be a whole number"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"density": 0}, r"density must be in \(0, 1\], got 0"),
        ({"density": 1.5}, r"density must be in \(0, 1\], got 1.5"),
        ({"inner_workers": 3, "inner_link": "1Gbit"}, "inner_workers must divide workers, got 3 and 16"),
        ({"inner_workers": 4}, "go together, got 4 and None"),
        ({"inner_link": "1Gbit"}, "go together, got 1 and '1Gbit'"),
        ({"methods": ["zip"]}, "no method zip; there are dense float32, "),
        ({"costs": {}}, "costs has none for dense float32, "),
    ],
)
def test_bad_arguments_are_named(changed, says):
    with pytest.raises(ValueError, match=says):
        plan(**changed)


def test_numbers_that_are_none_are_refused():
    with pytest.raises(TypeError, match="link must be such as"):
        plan(link=None)


def test_the_docstring_of_plan_runs():
    result = doctest.testmod(sys.modules["gcjax._planner.plan"])
    assert result == (0, 4)


def test_units_are_read_and_written():
    assert as_link("link", "2.5GB/s", 0.0).bits_per_second == 20e9
    assert [as_link("link", x, 0.0).bits_per_second for x in ("100Mbit", "1 Gbps", "1e3bit/s", 5)] == [1e8, 1e9, 1e3, 5]
    assert [as_seconds("t", x) for x in ("300ms", "50us", "2s", 1)] == pytest.approx([0.3, 5e-5, 2, 1])
    assert [as_count("n", x) for x in ("25.6M", "7B", "512", 3)] == [25_600_000, 7_000_000_000, 512, 3]
    assert [rate_text(x) for x in (2.5e9, 1e8, 0, math.inf)] == ["2.5 Gbit", "100 Mbit", "never", "always"]


def test_the_fit_finds_the_cost_behind_exact_timings():
    true = gcjax.Cost(1e-4, 3e-9, 2e-10)
    points = [(n, 10 * n * p, true.fixed + true.per_parameter * n + true.per_byte * 10 * n * p)
              for n in (1e6, 6e6) for p in (2, 8)]  # fmt: skip
    assert costs.fit(points) == pytest.approx(true)


def test_the_fit_has_no_negative_part():
    cost = costs.fit([(1e6, 0, 1e-3), (8e6, 0, 9e-3)])  # more than proportional: a constant would be negative
    assert min(cost) >= 0
    assert cost.per_parameter == pytest.approx(73 / 65 * 1e-9)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The measurements replaced by a counter."""
    measured = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(costs, "measure", lambda method: measured.append(method) or gcjax.Cost(0.0, 1e-9, 0.0))
    return tmp_path / "gcjax" / "costs.json", measured


def test_costs_are_measured_once_and_kept(cache):
    path, measured = cache
    calls = []
    plan(methods=["top_k"], costs=None, progress=lambda *call: calls.append(call))
    assert calls == [(0, 2, "dense float32"), (1, 2, "top_k")]
    plan(methods=["top_k"], costs=None)
    assert len(measured) == 2
    plan(methods=["onebit"], costs=None)
    assert len(measured) == 3
    assert list(json.loads(path.read_text()).values()) == [
        {name: [0, 1e-9, 0] for name in ("dense float32", "top_k", "onebit")}
    ]
    assert set(gcjax.measure_costs()) == set(STANDARD)


def test_costs_of_other_versions_are_not_used(cache, monkeypatch):
    _, measured = cache
    plan(methods=[], costs=None)
    monkeypatch.setattr(gcjax, "__version__", "9.9")
    plan(methods=[], costs=None)
    assert len(measured) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"cpu": {"top_k": [1, 2]}}', '{"cpu": {"top_k": "fast"}}', "\x00"])
def test_a_damaged_file_of_costs_is_named(cache, text):
    path, _ = cache
    path.parent.mkdir()
    path.write_text(text)
    with pytest.raises(ValueError, match=r"costs.json is not a table of costs .*; delete it"):
        plan(costs=None)


def test_a_method_is_measured_on_this_device():
    cost = costs.measure(STANDARD["ef_sign"], settings=((5_000, 2), (20_000, 5)))
    assert min(cost) >= 0
    assert 0 < cost.seconds(20_000, (Transfer("all_gather", 4_000),), 5) < 1


def command(*arguments, **environment):
    run = [sys.executable, "-m", "gcjax", *arguments]
    return subprocess.run(run, capture_output=True, text=True, env=os.environ | environment, timeout=120)


ASKED = ("plan", "--params=25.6M", "--workers=16", "--link=1Gbit", "--step-time=0.3s", "--methods", "top_k", "ef_sign")


def test_the_command_line_prints_the_table_and_draws_the_plot(tmp_path):
    folder = tmp_path / "gcjax"
    folder.mkdir()
    (folder / "costs.json").write_text(json.dumps({costs._device(): {name: list(COSTS[name]) for name in STANDARD}}))
    plot = tmp_path / "plan.png"
    done = command(*ASKED, f"--plot={plot}", XDG_CACHE_HOME=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{plan(methods=['top_k', 'ef_sign'])}\n"
    assert plot.stat().st_size > 10_000


def test_the_command_line_measures_again_and_knows_hosts_of_several_workers(cache, capsys):
    from gcjax.__main__ import main

    _, measured = cache
    assert (
        main([*ASKED, "--measure", "--inner-workers=8", "--inner-link=300Gbit", "--latency=20us", "--density=0.002"])
        == 0
    )
    assert len(measured) == len(STANDARD)
    out, err = capsys.readouterr()
    assert "16 workers in 2 hosts of 8" in out
    assert "top_k 1/500" in out
    assert err.startswith(f"measuring 1 of {len(STANDARD)} on this device, once: dense float32\n")


def test_the_command_line_refuses_what_it_cannot_read():
    from gcjax.__main__ import main

    for bad, says in (("--link=fast", "link must be a speed"), ("--density=1/0", "--density must be a share")):
        assert main([*ASKED, bad]) == 2, says
    with pytest.raises(SystemExit):
        main(["plan"])
    assert main([]) == 0


def test_a_missing_matplotlib_is_said_before_anything_is_measured(monkeypatch, capsys):
    from gcjax.__main__ import main

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*ASKED, "--plot=plan.png"]) == 2
    assert 'pip install "gcjax[examples]"' in capsys.readouterr().err
