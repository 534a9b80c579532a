"""Training steps with every method, and a script that compiles them all for a TPU or GPU target.

    python tests/accelerators/cases.py tpu FOLDER

runs in an interpreter that has the target's compiler. It writes each program's text to FOLDER and prints one line of
JSON for each case.
"""

import json
import math
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import gcjax
from bench.accelerators import targets
from gcjax import gossip
from gcjax._table import METHODS

PARAMS = {
    "kernel": jax.ShapeDtypeStruct((256, 128), jnp.float32),
    "bias": jax.ShapeDtypeStruct((128,), jnp.float32),
    "odd": jax.ShapeDtypeStruct((37,), jnp.float32),
    "conv": jax.ShapeDtypeStruct((3, 3, 16, 48), jnp.float32),
}
ENTRIES = sum(math.prod(x.shape) for x in PARAMS.values())  # 39,845
BATCH = jax.ShapeDtypeStruct((16,), jnp.float32)  # two samples of each worker
MESHES = {"one axis": {"data": 8}, "two axes": {"hosts": 2, "chips": 4}, "inner axis": {"hosts": 2, "chips": 4}}
AXES: dict[str, dict[str, Any]] = {
    "one axis": {"axis_name": "data"},
    "two axes": {"axis_name": ("hosts", "chips")},
    "inner axis": {"axis_name": "hosts", "inner_axis_name": "chips"},
}
FLAT = ("one axis", "two axes")
SCALARS = 64  # a program may all-reduce so many elements in all: flags, maxima and scales
MATRICES = (256 + 128) + (144 + 48)  # of PowerSGD: sides of the matrices
VECTORS = 128 + 37


class Case(NamedTuple):
    """A method with some options.

    Attributes:
      method: its name in `gcjax._table.METHODS` or `gcjax.gossip`.
      make: make(**axes) -> the transform.
      meshes: of `MESHES`.
      reduced: elements that the workers add up by design, beyond `SCALARS`. As many as the gradient has: only the dense
        mean, of gradients or of models. A share of it: TernGrad, whose workers add up codes of 8 bits.
      squares: uses `sum_grad_squared`.
    """

    method: str
    make: Callable[..., optax.GradientTransformation]
    meshes: tuple[str, ...] = FLAT
    reduced: int = 0
    squares: bool = False


def _keyed(factory: Callable, *args: Any, **options: Any) -> Callable:
    return lambda **axes: factory(*args, key=jax.random.key(0), **options, **axes)


def _plain(factory: Callable, *args: Any, **options: Any) -> Callable:
    return lambda **axes: factory(*args, **options, **axes)


def _variance(**options: Any) -> Callable:
    return _plain(gcjax.variance_compress, 1.5, **options)


OWNERS = {"transport": "two_phase"}
ALL = tuple(MESHES)
CASES = {
    "dense": Case("dense", _plain(gcjax.dense_compress), ALL, ENTRIES),
    "dense float16": Case("dense", _plain(gcjax.dense_compress, "float16")),
    "variance": Case("variance", _variance(), ALL, squares=True),
    "variance, one capacity": Case("variance", _variance(capacity=512), squares=True),
    "variance, two_phase": Case("variance", _variance(capacity=512, **OWNERS), squares=True),
    "hybrid": Case("variance", _variance(threshold=0.01), squares=True),
    "strom": Case("strom", _plain(gcjax.contrib.strom_compress, 0.01)),
    "top_k": Case("top_k", _plain(gcjax.top_k_compress, 0.01), ALL),
    "top_k, two_phase": Case("top_k", _plain(gcjax.top_k_compress, 0.01, **OWNERS), ALL),
    "dgc": Case("dgc", _plain(gcjax.dgc_compress, 0.01), reduced=VECTORS),
    "drop": Case("drop", _plain(gcjax.contrib.drop_compress, 0.01)),
    "drop, layer-wise": Case("drop", _plain(gcjax.contrib.drop_compress, 0.01, layer_wise=True)),
    "gaussian_k": Case("gaussian_k", _plain(gcjax.contrib.gaussian_k_compress, 0.01)),
    "dryden": Case("dryden", _plain(gcjax.contrib.dryden_compress, 0.01)),
    "random_k": Case("random_k", _keyed(gcjax.contrib.random_k_compress, 0.01), ALL, ENTRIES // 100),
    "random_k, blocks": Case(
        "random_k", _keyed(gcjax.contrib.random_k_compress, 0.01, block=32), reduced=ENTRIES // 100
    ),
    "sketch": Case("sketch", _keyed(gcjax.contrib.sketch_compress, 0.001), ALL, 54 * (ENTRIES // 1000)),
    "demo": Case("demo", _plain(gcjax.contrib.demo_compress)),
    "sparse_loco": Case("sparse_loco", _plain(gcjax.sparse_loco_compress)),
    "qsgd": Case("qsgd", _keyed(gcjax.qsgd_compress, 4), ALL),
    "terngrad": Case("terngrad", _keyed(gcjax.contrib.terngrad_compress), reduced=ENTRIES // 4),
    "natural": Case("natural", _keyed(gcjax.contrib.natural_compress)),
    "onebit": Case("onebit", _plain(gcjax.onebit_compress), ALL),
    "ef_sign": Case("ef_sign", _plain(gcjax.ef_sign_compress)),
    "sign_vote": Case("sign_vote", _plain(gcjax.contrib.sign_vote_compress), ALL),
    "signum": Case("signum", _plain(gcjax.contrib.signum_compress)),
    "power_sgd": Case("power_sgd", _keyed(gcjax.power_sgd_compress, 2), ALL, 2 * MATRICES + VECTORS),
    "swarm": Case("swarm_average", _keyed(gossip.swarm_average)),
    "swarm, 8 bits": Case("swarm_average", _keyed(gossip.swarm_average, bits=8)),
    "d_psgd": Case("d_psgd", _plain(gossip.d_psgd)),
    "sgp": Case("sgp", _plain(gossip.sgp)),
    "local_sgd": Case("local_sgd", _plain(gossip.local_sgd, 2), reduced=ENTRIES),
    "local_sgd, top_k": Case(
        "local_sgd", lambda **axes: gossip.local_sgd(2, compressor=gcjax.top_k_compress(0.01, **axes), **axes)
    ),
}
PAIRS = [(name, mesh) for name, case in CASES.items() for mesh in case.meshes]


def lower(name: str, mesh_name: str, target: str) -> jax.stages.Lowered:
    """The training step of a case."""
    case, mesh = CASES[name], targets.mesh_of(target, MESHES[mesh_name])
    tx = case.make(**AXES[mesh_name])
    if case.method in METHODS:
        chain = optax.chain(tx, optax.sgd(0.1, momentum=0.9))
        step: Any = gcjax.make_train_step(_loss, chain, mesh, axis_name=mesh.axis_names)
    else:
        step = gcjax.make_train_step(_loss, optax.chain(optax.sgd(0.1), tx), mesh, axis_name=mesh.axis_names)
    return targets.lower(step, mesh, PARAMS, BATCH)


def _loss(params: dict, batch: jax.Array) -> jax.Array:
    outputs = [jnp.sum(jnp.tanh(batch[:, None] * x.reshape(1, -1)), axis=1) for x in params.values()]
    return jnp.mean(sum(outputs))


def main() -> None:
    target, folder = sys.argv[1:]
    for number, (name, mesh) in enumerate(PAIRS):
        found: dict[str, Any] = {"name": name, "mesh": mesh}
        begin = time.perf_counter()
        try:
            compiled = lower(name, mesh, target).compile()
        except Exception:
            found["error"] = traceback.format_exc()
        else:
            path = Path(folder) / f"{number}.txt"
            path.write_text(compiled.as_text())
            found["text"] = str(path)
        print(json.dumps(found | {"seconds": round(time.perf_counter() - begin, 1)}), flush=True)


if __name__ == "__main__":
    main()
