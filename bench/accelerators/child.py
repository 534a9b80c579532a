"""Compiles one training step for eight accelerators that need not exist, in an interpreter that has the compiler."""

import json
import math
import sys
import time
from typing import Any

WORKERS, BATCH = 8, 64  # samples of each worker
WITH_SQUARES = ("variance", "variance, one capacity", "hybrid")
WITHOUT_SQUARES = ("top_k 1/100", "dgc 1/100", "qsgd 4 bits", "onebit", "power_sgd rank 2")
METHODS = ("plain pmean", "dense", *WITH_SQUARES, *WITHOUT_SQUARES)
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152 shared_memory_per_core: 233472
  threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128 block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  clock_rate_ghz: 1.98 device_memory_size: 84978434048 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 } registers_per_core_limit: 65536 registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } device_description_str: "NVIDIA H100"
"""


def main() -> None:
    job = json.loads(sys.argv[1])
    print(json.dumps(measure(job)))


def measure(job: dict) -> dict:
    """Compile the job's step and report what the compiler says.

    Args:
      job: `target` "tpu" or "gpu"; `layers` and `width` of the model; `method`, one of `METHODS`.
    """
    from bench.accelerators import hlo

    lowered, parameters = lower(job)
    begin = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    program = hlo.parse(compiled.as_text())
    memory = compiled.memory_analysis()
    return {
        "parameters": parameters,
        "compile_s": round(seconds, 2),
        "temporaries_mb": round(memory.temp_size_in_bytes / 1e6, 1),
        "cycles": hlo.cycles(program, most_costly=False),
        "cycles_most": hlo.cycles(program, most_costly=True),
        **hlo.counts(program, large=parameters // 2),
    }


def devices(target: str) -> Any:
    """The eight devices of a TPU v5e or of a host with H100s."""
    from jax.experimental import topologies

    if target == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    return topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H100, topology="1x1x8").devices


def lower(job: dict) -> tuple[Any, int]:
    """The lowered step of a tanh network with Adam, and its number of parameters."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import gcjax

    mesh = jax.sharding.Mesh(np.asarray(devices(job["target"])).reshape(WORKERS), ("data",))
    width = job["width"]
    params = {f"layer{i:02}": jax.ShapeDtypeStruct((width, width), jnp.float32) for i in range(job["layers"])}
    compress, squares = compressor(job["method"]), job["method"] in WITH_SQUARES
    tx = optax.chain(*([compress] if compress else []), optax.adam(1e-3))

    def loss_fn(params, batch):
        x, y = batch
        for name in sorted(params):
            x = jnp.tanh(x @ params[name])
        return jnp.mean((x - y) ** 2)

    def local_step(params, opt_state, batch):
        if compress is None:  # shard_map sums the gradients of replicated parameters: plain data parallelism
            grad = jax.grad(loss_fn)(params, batch)
            updates, opt_state = tx.update(jax.tree.map(lambda g: g / WORKERS, grad), opt_state, params)
        elif squares:
            _, moments = gcjax.value_and_moments(loss_fn)(params, batch)
            extra = {"sum_grad_squared": moments.sum_grad_squared}
            updates, opt_state = tx.update(moments.grad, opt_state, params, **extra)
        else:
            grad = gcjax.local_gradients(jax.grad(loss_fn), "data")(params, batch)
            updates, opt_state = tx.update(grad, opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    state = jax.eval_shape(tx.init, params)
    specs = gcjax.state_specs(state)

    def placed(node, spec):
        """Global shapes on the mesh; the leaves of all workers stand one after the other."""
        times = WORKERS if any(spec) else 1

        def one(x):
            shape = (x.shape[0] * times, *x.shape[1:]) if x.shape else x.shape
            return jax.ShapeDtypeStruct(shape, x.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(one, node)

    flat_specs, treedef = jax.tree.flatten(specs, is_leaf=lambda node: isinstance(node, P))
    nodes = treedef.flatten_up_to(state)
    state = treedef.unflatten([placed(node, spec) for node, spec in zip(nodes, flat_specs, strict=True)])
    params = jax.tree.map(lambda x: placed(x, P()), params)
    samples = jax.ShapeDtypeStruct((WORKERS * BATCH, width), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    step = jax.shard_map(local_step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
    parameters = sum(math.prod(x.shape) for x in jax.tree.leaves(params))
    return jax.jit(step, donate_argnums=(0, 1)).lower(params, state, (samples, samples)), parameters


def compressor(method: str) -> Any:
    """The compressor of a row, over the axis "data"; None for plain data parallelism."""
    import jax

    import gcjax

    key = jax.random.key(0)
    return {
        "plain pmean": lambda: None,
        "dense": lambda: gcjax.dense_compress(axis_name="data"),
        "variance": lambda: gcjax.variance_compress(1.5, axis_name="data"),
        "variance, one capacity": lambda: gcjax.variance_compress(1.5, capacity=1 << 18, axis_name="data"),
        "hybrid": lambda: gcjax.variance_compress(1.5, threshold=0.01, axis_name="data"),
        "top_k 1/100": lambda: gcjax.top_k_compress(0.01, axis_name="data"),
        "dgc 1/100": lambda: gcjax.dgc_compress(0.01, axis_name="data"),
        "qsgd 4 bits": lambda: gcjax.qsgd_compress(4, key=key, axis_name="data"),
        "onebit": lambda: gcjax.onebit_compress(axis_name="data"),
        "power_sgd rank 2": lambda: gcjax.power_sgd_compress(2, key=key, axis_name="data"),
    }[method]()


if __name__ == "__main__":
    main()
