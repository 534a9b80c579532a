"""Costs of methods: fitted to timings, measured once, kept in a file."""

import json

import jax
import pytest

import gcjax
from gcjax._comm.simulated import Transfer
from gcjax._planner import costs
from gcjax._planner.costs import cost_file, costs_of, device_name
from gcjax._planner.measuring import fit, measure, standard_methods

STANDARD = standard_methods(0.01)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The methods that were measured: counted instead, into a file of the test's own."""
    found = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(costs, "measure", lambda method: found.append(method) or gcjax.Cost(0.0, 1e-9, 0.0))
    return found


def kept():
    return json.loads(cost_file().read_text())


def standard(*names):
    return {name: STANDARD[name] for name in names}


def test_fit_recovers_the_cost_of_exact_timings():
    true = gcjax.Cost(1e-4, 3e-9, 2e-10)
    points = [(n, 10 * n * p, true.fixed + true.per_parameter * n + true.per_byte * 10 * n * p)
              for n in (1e6, 6e6) for p in (2, 8)]  # fmt: skip
    assert fit(points) == pytest.approx(true)


def test_fit_has_no_negative_part():
    cost = fit([(1e6, 0, 1e-3), (8e6, 0, 9e-3)])  # more than proportional: a constant would be negative
    assert min(cost) >= 0
    assert cost.per_parameter == pytest.approx(73 / 65 * 1e-9)


def test_a_method_is_measured_on_this_device():
    cost = measure(STANDARD["ef_sign"], settings=((5_000, 2), (20_000, 5)))
    assert min(cost) >= 0
    assert 0 < cost.seconds(20_000, (Transfer("all_gather", 4_000),), 5) < 1


def test_every_public_method_has_a_cost():
    exported = {name.removesuffix("_compress") for name in gcjax.methods.__all__ + gcjax.contrib.__all__}
    assert {name.split()[0] for name in STANDARD} == exported


def test_costs_are_measured_once_and_kept(measured):
    calls = []
    costs_of(standard("dense float32", "top_k"), lambda *call: calls.append(call))
    assert calls == [(0, 2, "dense float32"), (1, 2, "top_k")]
    assert costs_of(standard("top_k")) == {"top_k": gcjax.Cost(0.0, 1e-9, 0.0)}
    assert len(measured) == 2
    costs_of(standard("dense float32", "onebit"))
    assert len(measured) == 3
    assert kept() == {device_name(): {name: [0, 1e-9, 0] for name in ("dense float32", "top_k", "onebit")}}
    assert set(gcjax.measure_costs()) == set(STANDARD)


def test_costs_of_other_devices_are_not_used(measured, monkeypatch):
    costs_of(standard("top_k"))
    monkeypatch.setattr(costs, "device_name", lambda: "gpu")
    costs_of(standard("top_k"))
    assert len(measured) == 2
    assert set(kept()) == {device_name(), "gpu"}


def test_device_name_holds_the_versions():
    assert f"jax {jax.__version__}, gcjax {gcjax.__version__}" in device_name()


@pytest.mark.parametrize("text", ["{", "[]", '{"cpu": {"top_k": [1, 2]}}', '{"cpu": {"top_k": "fast"}}', "\x00"])
def test_a_damaged_file_raises(measured, text):
    cost_file().parent.mkdir()
    cost_file().write_text(text)
    with pytest.raises(ValueError, match=r"costs.json is not a table of costs .*; delete it"):
        costs_of(standard("top_k"))


def test_costs_of_own_methods_are_not_kept(measured):
    own = gcjax.Method(lambda parameters: gcjax.dense_compress())
    for _ in range(2):
        assert set(costs_of({"mine": own} | standard("top_k"))) == {"mine", "top_k"}
    assert measured.count(own) == 2
    assert len(measured) == 3
    assert set(kept()[device_name()]) == {"top_k"}


def test_plan_reads_the_kept_costs(measured):
    costs_of(standard("dense float32"))
    assert gcjax.plan("1M", 4, "1Gbit", 0.3, methods=[]).dense.compute == 1e-9 * 1e6
    assert len(measured) == 1


def test_plan_passes_progress_on(measured):
    class Stop(Exception):
        pass

    def stop(*call):
        raise Stop(call)

    with pytest.raises(Stop, match=r"\(0, 2, 'dense float32'\)"):
        gcjax.plan("1M", 4, "1Gbit", 0.3, methods=["top_k"], progress=stop)
