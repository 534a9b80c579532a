"""`jax.export` of functions of states."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from rows import methods, usual
from selection import cases

import gcjax
from gcjax._export import from_bytes, to_bytes

PARAMS = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(5)}
ROWS = {row.name: row for row in methods()}


def nodes(tree):
    """(class, static fields) of every node of a tree structure."""
    if tree.node_data():
        yield tree.node_data()
    for child in tree.children():
        yield from nodes(child)


@cases("name", ROWS, default=lambda name: usual(ROWS[name]))
def test_every_class_in_a_state_is_registered(name):
    mesh = jax.make_mesh((4,), ("data",), devices=jax.devices()[:4])
    state = gcjax.distribute(ROWS[name].make("data").init(PARAMS), mesh)
    found = [(cls, static) for cls, static in nodes(jax.tree.structure(state)) if cls.__module__.startswith("gcjax")]
    assert len(found) >= 5
    for cls, static in found:
        if hasattr(cls, "_fields"):
            with pytest.raises(ValueError, match="Duplicate serialization registration"):
                export.register_namedtuple_serialization(cls, serialized_name="another")
        else:
            assert from_bytes(to_bytes(static)) == static
            with pytest.raises(ValueError, match="Duplicate serialization registration"):
                export.register_pytree_node_serialization(
                    cls, serialized_name="another", serialize_auxdata=to_bytes, deserialize_auxdata=from_bytes
                )


def test_a_function_of_a_state_is_exported_and_called():
    pytest.importorskip("flatbuffers")  # which jax.export needs and JAX does not install
    tx = gcjax.variance_compress(1.0, capacity=64)
    state = tx.init(PARAMS)
    update = jax.jit(lambda state, gradient: tx.update(gradient, state))
    restored = export.deserialize(export.export(update)(state, PARAMS).serialize())
    jax.tree.map(np.testing.assert_array_equal, restored.call(state, PARAMS), update(state, PARAMS))


def test_other_names_are_refused():
    with pytest.raises(ValueError, match=r"uses no_such_module:f, whose module has not been imported"):
        from_bytes(b'{"function": "no_such_module:f"}')
    with pytest.raises(ValueError, match=r"names os:system, which is neither a dataclass nor a NamedTuple"):
        from_bytes(b'{"class": "os:system", "fields": ["true"]}')
    with pytest.raises(TypeError, match="make it a function of a module or a dataclass"):
        to_bytes((lambda: 0,))
