"""`python -m gcjax selfcheck`: it holds here, and sees what is wrong."""

import jax
import optax
import pytest
from harness import mesh_of

import gcjax
from gcjax import _selfcheck
from gcjax.__main__ import main


def failed(make, name="dense"):
    checks = list(_selfcheck.selfcheck(mesh_of(4), {name: make}))
    return {check.law for check in checks if not check.holds}


def test_the_laws_hold_here(capsys, monkeypatch):
    few = {name: _selfcheck.METHODS[name] for name in ("dense", "variance, two_phase", "qsgd")}
    monkeypatch.setattr("gcjax.__main__.selfcheck", lambda mesh: _selfcheck.selfcheck(mesh, few))
    assert main(["selfcheck"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "8 x cpu" in lines[0]
    assert lines[-1] == "11 laws checked, 0 failed"
    assert all(line.startswith("holds  ") for line in lines[1:-1])
    assert main(["selfcheck", "--devices", "5"]) == 2
    assert "there are 8 cpu devices" in capsys.readouterr().err
    assert main(["selfcheck", "--devices", "0"]) == 2
    assert "--devices must be at least 1, got 0" in capsys.readouterr().err


def wrapped(change):
    """The dense mean with its update changed."""

    def make(axis):
        tx = gcjax.dense_compress(axis_name=axis)

        def update(updates, state, params=None, **extra_args):
            new, state = tx.update(updates, state, params, **extra_args)
            return jax.tree.map(lambda u, g: change(u, g, axis), new, updates), state

        return optax.GradientTransformationExtraArgs(tx.init, update)

    return make


BITS, LOST = "the same bits on all workers", "nothing is lost"
BYTES, REDUCED = "the program moves the bytes that are reported", "no all-reduce of the gradient's size"


@pytest.mark.parametrize(
    ("change", "laws"),
    [
        (lambda u, g, axis: u + 1e-7 * jax.lax.axis_index(axis), {BITS}),
        (lambda u, g, axis: 0.99 * u, {LOST}),
        (lambda u, g, axis: u + 1e-30 * jax.lax.psum(g * g, axis), {BYTES}),
    ],
    ids=["drift", "loss", "bytes"],
)
def test_what_is_wrong_is_seen(change, laws):
    assert failed(wrapped(change)) == laws


def test_a_reduced_gradient_is_seen():
    assert failed(lambda axis: gcjax.dense_compress(axis_name=axis), name="a method") == {REDUCED}


def test_a_gradient_summed_over_the_workers_is_seen(monkeypatch):
    monkeypatch.setattr(gcjax, "local_gradients", lambda grad, axis: grad)
    (check,) = _selfcheck.selfcheck(mesh_of(4), {})
    assert (check.law, check.holds) == ("each worker has its own gradient", False)


def test_one_device_is_nothing_to_check(monkeypatch, capsys):
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert main(["selfcheck"]) == 2
    assert "one device only" in capsys.readouterr().err
