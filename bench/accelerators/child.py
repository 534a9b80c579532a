"""Compiles one row of the bench, in an interpreter that has the compiler of its target."""

import json
import math
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

import gcjax
from bench.accelerators import hlo, targets
from bench.accelerators.models import MODELS, Model


class Method(NamedTuple):
    """make() -> the transform over the axis "data"; stands after the optimiser and averages models."""

    make: Callable[[], optax.GradientTransformation]
    gossip: bool = False


def _mean(gradient, params=None):
    return jax.tree.map(lambda x: jax.lax.pmean(x, "data"), gradient)


PLAIN, PASS = "plain pmean", "r + g, v + q"  # what the other rows are compared with
METHODS = {
    PLAIN: Method(lambda: optax.stateless(_mean)),
    "dense": Method(lambda: gcjax.dense_compress(axis_name="data")),
    "variance": Method(lambda: gcjax.variance_compress(1.5, axis_name="data")),
    "variance, one capacity": Method(lambda: gcjax.variance_compress(1.5, capacity=1 << 18, axis_name="data")),
    "hybrid": Method(lambda: gcjax.variance_compress(1.5, threshold=0.01, axis_name="data")),
    "top_k 1/100": Method(lambda: gcjax.top_k_compress(0.01, axis_name="data")),
    "dgc 1/100": Method(lambda: gcjax.dgc_compress(0.01, axis_name="data")),
    "qsgd 4 bits": Method(lambda: gcjax.qsgd_compress(4, key=jax.random.key(0), axis_name="data")),
    "onebit": Method(lambda: gcjax.onebit_compress(axis_name="data")),
    "power_sgd rank 2": Method(lambda: gcjax.power_sgd_compress(2, key=jax.random.key(0), axis_name="data")),
    "swarm 8 bits": Method(
        lambda: gcjax.gossip.swarm_average(1, bits=8, key=jax.random.key(0), axis_name="data"), gossip=True
    ),
}


def main() -> None:
    print(json.dumps(measure(**json.loads(sys.argv[1]))))


def measure(target: str, model: str, method: str) -> dict:
    """Compile a row's program and report what the compiler says.

    Args:
      target: "tpu" or "gpu".
      model: of `MODELS`.
      method: `PASS`, or one of `METHODS`.
    """
    built = MODELS[model]()
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(built.params))
    lowered = lower(built, target, method)
    begin, begin_cpu = time.perf_counter(), time.process_time()
    compiled = lowered.compile()
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    program = hlo.parse(compiled.as_text())
    found = {
        "parameters": parameters,
        "compile_s": round(seconds, 2),
        "compile_cpu_s": round(cpu_seconds, 2),
        "temporaries_mb": round(compiled.memory_analysis().temp_size_in_bytes / 1e6, 1),
        **hlo.counts(program, large=parameters // 2),
    }
    if target == "tpu":  # the other compiler makes no estimates
        found["cycles"] = hlo.cycles(program, most_costly=False)
        found["cycles_most"] = hlo.cycles(program, most_costly=True)
    return found


def lower(model: Model, target: str, method: str) -> jax.stages.Lowered:
    """The training step with Adam on eight workers; for `PASS` two additions to every leaf, in place."""
    mesh = targets.mesh_of(target, {"data": 8})
    if method == PASS:
        everywhere = NamedSharding(mesh, PartitionSpec())
        leaves = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=everywhere), model.params)
        add = jax.jit(lambda r, v, g, q: jax.tree.map(jnp.add, (r, v), (g, q)), donate_argnums=(0, 1))
        return add.lower(leaves, leaves, leaves, leaves)
    row = METHODS[method]
    if row.gossip:
        step = gcjax.make_train_step(model.loss, optax.chain(optax.adam(1e-3), row.make()), mesh)
    else:
        step = gcjax.make_train_step(model.loss, optax.chain(row.make(), optax.adam(1e-3)), mesh)
    return targets.lower(step, mesh, model.params, model.batch)


if __name__ == "__main__":
    main()
