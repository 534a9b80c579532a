"""What each process of test_several_processes.py does, and what it prints: its findings as one line of JSON."""

import json
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import gcjax
from gcjax._jax_compat import shared_store
from gcjax._training.consistency import compare_processes

LIMIT = 300  # seconds; a slow machine must not look like a hang
DEVICES = 2  # of each process
EQUAL_ROWS = (4, 2, 4)  # rows per device of the steps that all processes take together: two shapes
BASE = {"alpha": 1.5, "capacity": 64, "density": None, "rows": 4, "dtype": "float32", "seed": 0, "jax": jax.__version__}
CHANGES = {  # by case: what the last process does differently before its first step
    "alpha": {"alpha": 2.0},
    "capacity": {"capacity": 128},
    "method": {"density": 0.1},
    "rows": {"rows": 3},
    "dtype": {"dtype": "float16"},
    "seed": {"seed": 1},
    "jax": {"jax": "0.99"},
}


def make_step(mesh, options, loss=None, **more):
    """A training step and its first state."""
    if options["density"]:
        compress = gcjax.top_k_compress(options["density"], axis_name="data")
    else:
        compress = gcjax.variance_compress(options["alpha"], capacity=options["capacity"], axis_name="data")
    step = gcjax.make_train_step(loss or squares_loss, optax.chain(compress, optax.sgd(0.1)), mesh, **more)
    return step, step.init({"w": jax.random.normal(jax.random.key(options["seed"]), 2)})


def squares_loss(params, batch):
    return jnp.mean(jnp.square(batch[0] @ params["w"] - 1.0))


def summed_loss(params, batch):
    return jnp.sum(jnp.square(batch[0] @ params["w"] - 1.0))


def own_rows(rng, rows, dtype="float32"):
    """A process's part of a batch."""
    return rng.normal(size=(DEVICES * rows, 2)).astype(dtype)


def take_step(mesh, step, state, own):
    over_workers = jax.NamedSharding(mesh, jax.P("data"))
    batch = jax.make_array_from_process_local_data(over_workers, own)
    try:
        return jax.block_until_ready(step(state, [batch]))[0]
    except RuntimeError:
        assert not state.params["w"].is_deleted()  # nothing was donated
        raise


def first_step(mesh, options):
    with mock.patch.object(jax, "__version__", options["jax"]):
        rng = np.random.default_rng(jax.process_index())
        return take_step(mesh, *make_step(mesh, options), own_rows(rng, options["rows"], options["dtype"]))


def message_of(run, *args, **kwargs):
    try:
        run(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError) as error:
        return str(error)
    return None


def steps_until_stopped(mesh):
    """How many steps are taken when the last process has bad samples only, and the parameters then."""
    step, state = make_step(mesh, BASE, max_skipped=2)
    own = own_rows(np.random.default_rng(0), 4)
    if jax.process_index() == jax.process_count() - 1:
        own[:] = np.nan
    for taken in range(50):
        try:
            state = take_step(mesh, step, state, own)
        except FloatingPointError:
            return taken, np.asarray(state.params["w"]).tolist()
    return None


def messages_of_own_arrays(mesh, step, state):
    """What is said of arrays that this process alone has."""
    own = own_rows(np.random.default_rng(0), 6)  # which could be split over all workers
    fn = gcjax.compressed_value_and_grad(squares_loss, gcjax.dense_compress(axis_name="data"), mesh)
    calls = [step, step.lower, lambda state, batch: fn(state.params, fn.init(state.params), batch)]
    return [message_of(call, state, [rows]) for call in calls for rows in (own, jnp.asarray(own))]


def checks_so_far(store, process):
    return sum(key.endswith(f"/digests/{process}") for key, _ in store.key_value_dir_get_bytes("gcjax/"))


def main(port, processes, process, cases):
    """Go through the cases. While the processes differ, they use nothing but the key-value store."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES)
    limits = {"initialization_timeout": LIMIT, "heartbeat_timeout_seconds": LIMIT, "shutdown_timeout_seconds": LIMIT}
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, processes, process, coordinator_bind_address=address, **limits)
    mesh, store, is_last = jax.make_mesh((jax.device_count(),), ("data",)), shared_store(), process == processes - 1
    changes = {case: change for case, change in CHANGES.items() if case in cases}
    found = {case: message_of(first_step, mesh, BASE | (change if is_last else {})) for case, change in changes.items()}

    before = checks_so_far(store, process)
    rng = np.random.default_rng(process)
    step, state = make_step(mesh, BASE)
    for rows in EQUAL_ROWS:
        state = take_step(mesh, step, state, own_rows(rng, rows))
    found["checks"] = checks_so_far(store, process) - before
    found["w"] = np.asarray(state.params["w"]).tobytes().hex()
    found["alone"] = messages_of_own_arrays(mesh, step, state)
    whole = np.random.default_rng(0).normal(size=(4 * jax.device_count(), 2)).astype(np.float32)
    state, _ = jax.block_until_ready(step(state, [jax.device_put(whole, jax.NamedSharding(mesh, jax.P("data")))]))
    found["whole"] = np.asarray(state.params["w"]).tobytes().hex()
    info = gcjax.info(state.opt_state)
    found["info"] = [info.sent.shape, info.residual_norm.shape, info.wire_bytes]
    tx = gcjax.gossip.local_sgd(1, axis_name=mesh.axis_names)
    found["gossip info"] = gcjax.info(gcjax.distribute(tx.init(jnp.ones(3)), mesh)).bits.tolist()
    if "later" in cases:
        found["later"] = message_of(take_step, mesh, step, state, own_rows(rng, 3 if is_last else 1))

    if "sum" in cases:
        found["sum"] = message_of(take_step, mesh, *make_step(mesh, BASE, summed_loss), own_rows(rng, 4))
    found["stopped"] = steps_until_stopped(mesh)

    found["options"] = message_of(gcjax.check_agreement, mesh, options={"lr": [0.1, 0.2 + process]})
    found["function"] = message_of(gcjax.check_agreement, mesh, options={"f": main})
    alone = jax.make_mesh((DEVICES,), ("data",), devices=jax.local_devices())
    found["own mesh"] = message_of(gcjax.check_agreement, alone, options=process)
    if process:
        store.wait_at_barrier("before the check without process 0", 1000 * LIMIT, list(range(1, processes)))
        found["missing"] = message_of(compare_processes, mesh, {}, timeout_seconds=2)
    return found


if __name__ == "__main__":
    print(json.dumps(main(*map(int, sys.argv[1:4]), sys.argv[4:])), flush=True)
