"""Meshes of accelerators that need not exist, and training steps lowered for them.

Runs in an interpreter that has the compiler of the target (`environments.interpreter`).
"""

from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import gcjax

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


def mesh_of(target: str, sizes: dict[str, int]) -> Mesh:
    """A mesh of eight TPUs v5e ("tpu") or of a host's eight H100s ("gpu"). `sizes`: axis -> workers along it."""
    if target == "tpu":
        topology = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4")
    else:
        topology = topologies.get_topology_desc(platform="cuda", topology_name="", target_config=H100, topology="1x1x8")
    return Mesh(np.asarray(topology.devices).reshape(*sizes.values()), tuple(sizes))


def lower(step: Any, mesh: Mesh, params: Any, batch: Any) -> jax.stages.Lowered:
    """Lower a training step for the devices of a mesh, without arrays.

    Args:
      step: from `gcjax.make_train_step` or `gcjax.make_train_step`, over all axes of the mesh.
      mesh: the step's.
      params, batch: pytrees of `jax.ShapeDtypeStruct`s; the batch is global.
    """

    def placed(node, spec):
        def one(x):
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(one, node)

    state = jax.eval_shape(step.init, params)
    # Specs first: each of them stands for all the leaves of a node of the state.
    state = jax.tree.map(
        lambda spec, node: placed(node, spec),
        gcjax.state_specs(state),
        state,
        is_leaf=lambda node: isinstance(node, PartitionSpec),
    )
    return step.lower(state, placed(batch, PartitionSpec(mesh.axis_names)))
