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

METHODS = """
# mypy: disallow-any-generics, disallow-untyped-calls, disallow-untyped-defs, warn-return-any
import jax
import gcjax.extend as gx

Result = gx.StepResult[gx.EmptyState]
report = gx.dense_report(1, payload_bits=32)


def mean(step: gx.StepInput, state: gx.EmptyState) -> Result:
    return gx.StepResult(step.comm.mean(step.gradient), state, report)


def of_codec(step: gx.StepInput, state: gx.CodecState) -> gx.StepResult[gx.CodecState]:
    return gx.StepResult(step.gradient, state, report)


def encode(x: jax.Array, bucket: gx.Bucket, key: jax.Array) -> tuple[jax.Array, int]:
    return gx.hash_bits(key, bucket.positions()), bucket.entries


def decode(payload: jax.Array, bucket: gx.Bucket) -> jax.Array:
    return gx.bits_float(payload)


def tupled(step: gx.StepInput, state: gx.EmptyState) -> tuple[object, gx.EmptyState, gx.SendReport]:
    return step.gradient, state, report


def returns_a_tuple(step: gx.StepInput, state: gx.EmptyState) -> Result:
    return step.gradient, state, report  # error: got "tuple[


def returns_another_state(step: gx.StepInput, state: gx.CodecState) -> Result:
    return gx.StepResult(step.gradient, state, report)  # error: incompatible type "CodecState"; expected "EmptyState"


def forgets_the_report(step: gx.StepInput, state: gx.EmptyState) -> Result:
    return gx.StepResult(step.gradient, state)  # error: Missing positional argument "report"


gx.compress(gx.Compressor(gx.EmptyState, mean))
gx.compress(gx.dense_codec(encode, decode, feedback=False, key=jax.random.key(0)))
gx.compress(gx.leaf_codec(lambda x, key: x, lambda arrays, shape: arrays, feedback=False))
gx.Compressor(gx.EmptyState, tupled)  # error: expected "Callable[[StepInput, EmptyState], StepResult[EmptyState]]"
gx.Compressor(gx.EmptyState, of_codec)  # error: Cannot infer value of type parameter "S" of "Compressor"
"""


def mypy_errors(*paths):
    command = [sys.executable, "-m", "mypy", *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT.parent, timeout=300)
    assert done.returncode in (0, 1), done
    return [line for line in done.stdout.splitlines() if "error:" in line]


def test_the_package_and_user_code_type_check(tmp_path):
    path = tmp_path / "user_code.py"
    path.write_text(USER_CODE)
    (error,) = mypy_errors(ROOT, path)
    assert 'expression has type "float", variable has type "str"' in error


def test_a_wrong_result_of_a_method_does_not_type_check(tmp_path):
    path = tmp_path / "methods.py"
    path.write_text(METHODS)
    lines = enumerate(METHODS.splitlines(), start=1)
    wanted = [(number, line.split("# error: ")[1]) for number, line in lines if "# error: " in line]
    for error, (number, text) in zip(mypy_errors(path), wanted, strict=True):
        assert f"methods.py:{number}: error:" in error
        assert text in error


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
