"""Annotations: of the package itself, and as a user's type checker sees them."""

import ast
import pathlib
import subprocess
import sys

import pytest

import gcjax

ROOT = pathlib.Path(gcjax.__file__).parent

USER_CODE = """
import jax
import jax.numpy as jnp
import optax

import gcjax
from gcjax.extend import Bucket, Compressor, compress, dense_codec


def loss_fn(params: dict[str, jax.Array], batch: jax.Array) -> jax.Array:
    return jnp.mean((batch @ params["w"]) ** 2)


def encode(x: jax.Array, bucket: Bucket, key: jax.Array | None) -> tuple[jax.Array, float]:
    return x.astype(jnp.uint32), 32.0 * bucket.entries


def decode(payload: jax.Array, bucket: Bucket) -> jax.Array:
    return payload.astype(jnp.float32)


mesh = jax.make_mesh((8,), ("data",))
tx = optax.chain(gcjax.variance_compress(alpha=1.5, axis_name="data"), optax.adam(1e-3))
step = gcjax.make_train_step(loss_fn, tx, mesh, axis_name="data")
state: gcjax.TrainState = step.init({"w": jnp.ones(2)}, key=jax.random.key(0))
state, metrics = step(state, jnp.ones((64, 2)))
loss: jax.Array = metrics.loss
ratio: float = gcjax.info(state.opt_state).compression_ratio
codec: Compressor = dense_codec(encode, decode, feedback=True)
mine = compress(codec, axis_name="data")
plan: gcjax.Plan = gcjax.plan("25.6M", workers=16, link="1Gbit", step_time="0.3s")
speedup: float = plan.best.speedup
wrong: str = ratio  # the only error
"""


def test_the_package_and_user_code_type_check(tmp_path):
    path = tmp_path / "user_code.py"
    path.write_text(USER_CODE)
    command = [sys.executable, "-m", "mypy", str(ROOT), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent, timeout=300)
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1, done
    assert 'expression has type "float", variable has type "str"' in errors[0]


def public_functions(tree, inside=""):
    """(name, definition) of functions of the module and methods of its classes, private ones left out."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and (not node.name.startswith("_") or node.name == "__call__"):
            yield inside + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from public_functions(node, f"{node.name}.")


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_public_functions_are_annotated(path):
    for name, node in public_functions(ast.parse(path.read_text())):
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        missing = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
        assert not missing, f"{name} does not annotate {missing}"
        assert node.returns is not None, f"{name} does not annotate what it returns"


def test_the_package_ships_its_types():
    assert (ROOT / "py.typed").exists()
