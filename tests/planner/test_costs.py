"""Costs of methods: fitted to timings, measured once, kept in a file."""

import json

import jax
import pytest

import gcjax
from gcjax._comm.simulated import Transfer
from gcjax._planner.costs import CostStore, device_name
from gcjax._planner.measuring import fit, measure, standard_methods

STANDARD = standard_methods(0.01)


@pytest.fixture
def counted(tmp_path):
    """A store whose measurements are counted, not made."""
    measured = []
    store = CostStore(
        tmp_path / "gcjax" / "costs.json", "cpu", lambda method: measured.append(method) or gcjax.Cost(0.0, 1e-9, 0.0)
    )
    return store, measured


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


def test_costs_are_measured_once_and_kept(counted):
    store, measured = counted
    calls = []
    store.known(["dense float32", "top_k"], lambda *call: calls.append(call))
    assert calls == [(0, 2, "dense float32"), (1, 2, "top_k")]
    assert set(store.known(["top_k"])) == {"top_k"}
    assert len(measured) == 2
    store.known(["dense float32", "onebit"])
    assert len(measured) == 3
    assert json.loads(store.path.read_text()) == {
        "cpu": {name: [0, 1e-9, 0] for name in ("dense float32", "top_k", "onebit")}
    }
    assert set(store.measured()) == set(STANDARD)


def test_costs_of_other_devices_are_not_used(counted):
    store, measured = counted
    store.known(["top_k"])
    CostStore(store.path, "gpu", store.measure).known(["top_k"])
    assert len(measured) == 2
    assert set(json.loads(store.path.read_text())) == {"cpu", "gpu"}


def test_device_name_holds_the_versions():
    assert f"jax {jax.__version__}, gcjax {gcjax.__version__}" in device_name()


@pytest.mark.parametrize("text", ["{", "[]", '{"cpu": {"top_k": [1, 2]}}', '{"cpu": {"top_k": "fast"}}', "\x00"])
def test_a_damaged_file_raises(counted, text):
    store, _ = counted
    store.path.parent.mkdir()
    store.path.write_text(text)
    with pytest.raises(ValueError, match=r"costs.json is not a table of costs .*; delete it"):
        store.known(["top_k"])


def test_costs_of_own_methods_are_not_kept(counted):
    store, measured = counted
    own = gcjax.Method(lambda parameters: gcjax.dense_compress())
    for _ in range(2):
        assert set(store.costs_of({"mine": own, "top_k": STANDARD["top_k"]})) == {"mine", "top_k"}
    assert measured.count(own) == 2
    assert len(measured) == 3
    assert set(json.loads(store.path.read_text())["cpu"]) == {"top_k"}


def test_plan_reads_the_kept_costs(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    CostStore(measure=lambda method: gcjax.Cost(7.0, 0.0, 0.0)).known(["dense float32"])
    assert gcjax.plan("1M", 4, "1Gbit", 0.3, methods=[]).dense.compute == 7.0


def test_plan_passes_progress_on(tmp_path, monkeypatch):
    class Stop(Exception):
        pass

    def stop(*call):
        raise Stop(call)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(Stop, match=r"\(0, 2, 'dense float32'\)"):
        gcjax.plan("1M", 4, "1Gbit", 0.3, methods=["top_k"], progress=stop)
