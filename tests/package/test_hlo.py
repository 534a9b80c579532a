"""What is read from the text of compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from harness import mesh_of
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from wire import along

from gcjax import _hlo

ROWS = {frozenset({0, 1, 2, 3}), frozenset({4, 5, 6, 7})}
COLUMNS = {frozenset({i, i + 4}) for i in range(4)}


@pytest.mark.parametrize(
    ("printed", "groups"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}, x={1}", ROWS),
        ("replica_groups=[2,4]<=[8], dimensions={0}", ROWS),
        ("replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}", COLUMNS),
        ("replica_groups=mesh['slow'=2,'fast'=4] {'fast'}, dimensions={0}", ROWS),
        ("replica_groups=mesh['slow'=2,'fast'=4] {'slow'}", COLUMNS),
        ("replica_groups=mesh['slow'=2,'fast'=4] {'slow','fast'}", {frozenset(range(8))}),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}",
            {frozenset({i, i + 1}) for i in (0, 2, 4, 6)},
        ),
        ("ROOT add = f32[2] add(a, b)", None),
    ],
)
def test_replica_groups_are_read_in_all_of_their_forms(printed, groups):
    assert _hlo.replica_groups(printed) == groups


@pytest.mark.parametrize(
    "printed",
    [
        "replica_groups=mesh['a'=8] {'a':(1)4}",
        "replica_groups=new[8]",
        "replica_groups=mesh['a'=2], device_ids=({1,0}) {'a'}",
    ],
)
def test_an_unknown_form_of_replica_groups_raises(printed):
    with pytest.raises(ValueError, match="unknown form"):
        _hlo.replica_groups(printed)


def test_collectives_of_a_program_have_their_groups_and_bytes():
    mesh = jax.make_mesh((2, 4), ("slow", "fast"), (AxisType.Auto,) * 2)

    def local(x):
        mean = jax.lax.pmean(x, "slow")
        return mean + jax.lax.all_gather(x, "fast").sum(0) + jax.lax.ppermute(x, ("fast",), [(0, 1)])

    over = P(("slow", "fast"))
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=over, out_specs=over))
    found = _hlo.collectives(run.lower(jnp.ones(8 * 10)).compile().as_text())
    by_kind = {c.kind: c for c in found}
    assert len(found) == 3
    assert (by_kind["all-reduce"].groups, by_kind["all-reduce"].ring_bytes) == (COLUMNS, 2 * 0.5 * 40)
    assert (by_kind["all-gather"].groups, by_kind["all-gather"].ring_bytes) == (ROWS, 0.75 * 160)
    assert (by_kind["collective-permute"].groups, by_kind["collective-permute"].ring_bytes) == (None, 40)
    assert along(found, mesh, ("slow",)) == [by_kind["all-reduce"]]
    assert along(found, mesh, ("fast",)) == [by_kind["all-gather"]]


def test_collectives_in_a_branch_have_its_name():
    def local(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: jax.lax.all_gather(x, "data").sum(0), jnp.sin, x)

    mesh = mesh_of(2)
    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False))
    (found,) = _hlo.collectives(run.lower(jnp.ones((2, 3))).compile().as_text())
    assert found.kind == "all-gather"
    assert found.computation
