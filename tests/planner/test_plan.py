"""Predictions: times calculated by hand, comparisons, advice, arguments."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compact import compact_words

import gcjax
from gcjax._comm.link import as_link
from gcjax._comm.simulated import Transfer
from gcjax._planner.measuring import standard_methods
from gcjax._units import as_count, as_seconds, rate_text

COSTS = {name: gcjax.Cost(1e-3, 1e-9, 1e-9) for name in standard_methods(0.01)}
COSTS["dense float32"] = gcjax.Cost(1e-3, 1e-9, 0)
MAIN = ["variance", "variance (two_phase)", "top_k", "power_sgd rank 2"]


def plan(params="25.6M", workers=16, link="1Gbit", step_time=0.3, *, methods=MAIN, costs=COSTS, **options):
    return gcjax.plan(params, workers, link, step_time, methods=methods, costs=costs, **options)


def row_of(found, method):
    return next(row for row in found.rows if row.method == method)


# 8 Mbit/s without headers: 1 byte per microsecond.
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
def test_seconds_of_a_collective(kind, size, workers, milliseconds):
    assert 1e3 * SLOW.seconds(Transfer(kind, size), workers) == pytest.approx(milliseconds)


def test_headers_take_a_share_of_the_link():
    assert gcjax.Link(8e6, 0.0).seconds(Transfer("all_gather", 1000), 2) == pytest.approx(1e-3 * 1514 / 1448)


def test_seconds_of_a_dense_step():
    found = plan("1M", 4, SLOW, 0.5, methods=[], costs={"dense float32": gcjax.Cost(0.01, 2e-9, 5e-9)})
    wire = 2 * (2 * 0.001 + 3 / 4 * 4.0) + 2 * (0.001 + 20e-6)  # the gradient, and a maximum of 20 bytes
    assert found.dense.compute == pytest.approx(0.01 + 0.002 + 5e-9 * 4_000_020)
    assert found.dense.wire == pytest.approx(wire)
    assert found.dense.step == pytest.approx(0.5 + found.dense.compute + wire)
    assert found.half == pytest.approx(found.dense.step - 3.0 - 2 * 10e-6)


def test_seconds_with_two_levels_of_network():
    fast = gcjax.Link(8e9, latency=0.0, efficiency=1.0)
    found = plan("1M", 8, SLOW, 0.5, methods=["variance"], inner_workers=4, inner_link=fast)
    row = row_of(found, "variance 1/100")
    # Count, a scale, and the entries: in whole 1,024 (10,240), among those of 31,360 mask words. All in whole 8.
    payload = 4 * 8 * math.ceil((2 + compact_words(10_240, 32 * 31_360, 4)) / 8)
    assert row.wire_bytes == pytest.approx(payload + 20)
    between = 0.001 + payload / 1e6 + (0.001 + 20e-6)
    inside = 2 * (2 * 3 / 4 * 4e6) / 1e9 + 3 * (2 * payload // 4) / 1e9  # gradient and squares; gathering the parts
    assert row.wire == pytest.approx(between + inside, rel=1e-6)
    inside = (2 * 3 / 4 * 4e6 + 3 * 1e6) / 1e9
    assert found.dense.wire == pytest.approx((0.001 + 4.0) + (0.001 + 20e-6) + inside, rel=1e-6)


def test_a_single_host_uses_only_the_inner_link():
    found = plan(workers=8, inner_workers=8, inner_link="300Gbit")
    assert {row.wire_bytes for row in found.rows} == {0}
    assert found.at("1kbit").dense.step == found.dense.step > 0.3


def test_faster_links_make_every_step_faster():
    found = plan()
    names = [row.method for row in found.rows]
    links = [found.at(link) for link in ("10Mbit", "100Mbit", "1Gbit", "10Gbit", "1Tbit")]
    steps = np.asarray([[row_of(other, name).step for name in names] for other in links])
    assert (np.diff(steps, axis=0) < 0).all()


def test_methods_pay_below_the_break_even_only():
    found = plan()
    for row in found.rows:
        if row is not found.dense:
            for factor, pays in ((0.999, True), (1.001, False)):
                other = found.at(factor * row.break_even)
                assert (row_of(other, row.method).step < other.dense.step) == pays


def test_methods_that_always_or_never_pay_say_so():
    costs = COSTS | {"two phases": gcjax.Cost(0, 0, 0), "gathered": gcjax.Cost(1, 0, 0)}

    def qsgd(transport):
        return gcjax.Method(lambda _: gcjax.qsgd_compress(4, key=jax.random.key(0), transport=transport))

    methods = {"two phases": qsgd("two_phase"), "gathered": qsgd("all_gather")}
    found = plan(workers=256, methods=methods, costs=costs, latency=0)
    assert row_of(found, "two phases").break_even == math.inf
    assert row_of(found, "gathered").break_even == 0.0  # 255 times an eighth of the gradient
    assert "always" in str(found)
    assert "never" in str(found)


def test_rows_are_sorted_and_the_best_is_not_dense():
    found = plan()
    assert [row.step for row in found.rows] == sorted(row.step for row in found.rows)
    assert found.best is found.rows[0]
    assert found.best.speedup == pytest.approx(found.dense.step / found.best.step)
    fast = found.at("10Tbit")
    assert fast.rows[0] is fast.dense is not fast.best


def test_bytes_through_owners_hardly_grow_with_workers():
    few, many = (plan(workers=workers) for workers in (128, 1024))  # owners send codes of all entries
    ratio = [row_of(many, name).wire_bytes / row_of(few, name).wire_bytes
             for name in ("variance 1/100", "variance 1/100 (two_phase)")]  # fmt: skip
    assert ratio[0] == pytest.approx(1023 / 127, rel=1e-3)
    assert ratio[1] < 1.2


def test_plans_beyond_the_measured_hosts_say_so_and_end_at_1024():
    inside = {"inner_workers": 8, "inner_link": "300Gbit"}
    assert "Extrapolated" not in str(plan(workers=4)) + str(plan(workers=32, **inside))
    assert "Extrapolated: predictions were compared with measurements of up to 4 hosts." in str(plan(workers=5))
    many = plan("256M", 1024, methods=["variance", "sign_vote"])
    assert row_of(many, "variance 1/100").arriving_bytes > 1e9
    assert "* " in str(plan("5B", 1024, methods=["variance"]))  # gathers more than 10 GB
    for options in ({"workers": 1025}, {"workers": 8200, **inside}):
        with pytest.raises(ValueError, match=r"at most 1,024 hosts, got 1,025: predictions were compared"):
            plan(**options)


def test_advice_follows_the_numbers():
    for options in ({"workers": 1}, {"workers": 8, "inner_workers": 8, "inner_link": "1Mbit"}):
        alone = plan(methods=["variance"], costs=COSTS | {"dense float32": gcjax.Cost(1, 0, 0)}, **options)
        assert alone.advice == "Do not compress: nothing crosses the link."
    found = plan(methods=["variance"])
    assert found.at("10Tbit").advice.startswith("Do not compress: the best, variance 1/100, is slower than dense")
    nearly = found.at(0.98 * found.best.break_even).advice
    assert nearly.startswith("Do not compress: the best, variance 1/100, saves 0.")
    assert found.advice.startswith(
        f"variance 1/100 takes {1e3 * found.best.step:.0f} ms a step, dense float32 1.93 s, "
    )
    assert "accuracy" in found.advice
    slow = COSTS | {"variance": gcjax.Cost(0.8, 0, 0)}
    assert plan(link="1Gbit", methods=["variance"], costs=slow).advice.startswith("A float16 all-reduce will do")


def test_density_decides_what_sparse_methods_send():
    found = plan(methods=["variance", "onebit"], density=1 / 500)
    assert row_of(found, "variance 1/500").wire_bytes == pytest.approx(15 * 15 / 8 * 25.6e6 / 500, rel=0.05)
    assert row_of(found, "onebit").wire_bytes == pytest.approx(15 * 25.6e6 / 8 / 8, rel=0.1)
    assert row_of(plan(density=0.03, methods=["top_k"]), "top_k 0.03")


def test_own_methods_are_compared_with_dense():
    own = {"mine": gcjax.Method(lambda parameters: gcjax.power_sgd_compress(3, key=jax.random.key(0)))}
    found = plan({"w": jnp.zeros((300, 200)), "b": jnp.zeros(200)}, methods=own, costs=COSTS | {"mine": (0, 0, 0)})
    assert {row.method for row in found.rows} == {"mine", "dense float32"}
    assert found.setting.parameters == 60_200
    assert row_of(found, "mine").update.transfers[1:] == (
        Transfer("all_reduce", 4 * (3 * 300 + 200)),
        Transfer("all_reduce", 4 * 3 * 200),
    )


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"link": "fast"}, r"link must be a speed such as \"1Gbit\".*'fast'"),
        ({"link": "1Gbyte"}, "link"),
        ({"link": "1000000000"}, 'link must be a speed such as "1Gbit", "100Mbit" or "50GB/s", got'),
        ({"link": 0}, "link must be finite and above 0"),
        ({"link": "0Gbit"}, "got '0Gbit'"),
        ({"step_time": "soon"}, r"step_time must be a time such as \"0.3s\".*'soon'"),
        ({"step_time": -1}, "step_time must be finite and at least 0"),
        ({"latency": "1 hour"}, "latency"),
        ({"params": "many"}, r"params must be a whole number such as \"25.6M\".*'many'"),
        ({"params": 0}, "params must be finite and above 0"),
        ({"params": 10.5}, "params must be a whole number"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"density": 0}, r"density must be in \(0, 1\], got 0"),
        ({"density": 1.5}, r"density must be in \(0, 1\], got 1.5"),
        ({"inner_workers": 3, "inner_link": "1Gbit"}, "inner_workers must divide workers, got 3 and 16"),
        ({"inner_workers": 4}, "go together, got 4 and None"),
        ({"inner_link": "1Gbit"}, "go together, got 1 and '1Gbit'"),
        ({"methods": ["zip"]}, "no method zip; there are dense float32, "),
        ({"costs": {}}, "costs has no entry for dense float32, "),
        ({"link": gcjax.Link(0.0, 1e-3)}, r"link.bits_per_second must be in \(0, inf\), got 0.0"),
    ],
)
def test_bad_arguments_raise(changed, says):
    with pytest.raises(ValueError, match=says):
        plan(**changed)


def test_a_link_must_not_be_none():
    with pytest.raises(TypeError, match="link must be a speed such as"):
        plan(link=None)


def test_units_are_read_and_written():
    assert as_link("link", "2.5GB/s", 0.0).bits_per_second == 20e9
    assert [as_link("link", x, 0.0).bits_per_second for x in ("100Mbit", "1 Gbps", "1e3bit/s", 5)] == [1e8, 1e9, 1e3, 5]
    assert [as_seconds("t", x) for x in ("300ms", "50us", "2s", 1)] == pytest.approx([0.3, 5e-5, 2, 1])
    assert [as_count("n", x) for x in ("25.6M", "7B", "512", 3)] == [25_600_000, 7_000_000_000, 512, 3]
    assert [rate_text(x) for x in (2.5e9, 1e8, 0, math.inf)] == ["2.5 Gbit", "100 Mbit", "never", "always"]


@pytest.mark.parametrize("size", [np.int64(4_000_000), np.float32(4e6), np.array(4_000_000)])
def test_a_numpy_number_is_a_size(size):
    costs = {"dense float32": (0, 1e-9, 0), "top_k": (0, 3e-9, 2e-9)}
    plan = gcjax.plan(size, workers=4, link="1Gbit", step_time="0.1s", methods=["top_k"], costs=costs)
    assert plan.setting.parameters == 4_000_000
