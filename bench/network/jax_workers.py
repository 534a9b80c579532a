"""JAX's worker: the process on one host."""

import functools
from types import ModuleType

from bench.network.child import COLUMNS, counters, serve, take_share, timed


def _key():
    import jax

    return jax.random.key(0)


def _plain(gcjax: ModuleType, n: int, at: dict):
    """The alternative to gcjax: the mean of every leaf."""
    import jax
    import optax

    mean = functools.partial(jax.lax.pmean, **at) if at else lambda tree: tree
    return optax.stateless(lambda updates, params: mean(updates))


PLAIN = "psum float32"
# Name -> the kind of its gradients (GRADIENTS), and the transform for n parameters; `at` names the workers' axis.
ROWS = {
    PLAIN: ("normal", _plain),
    "dense float32": ("normal", lambda gcjax, n, at: gcjax.dense_compress(**at)),
    "dense float16": ("normal", lambda gcjax, n, at: gcjax.dense_compress("float16", **at)),
    "variance 1/100": (
        "1/100",
        lambda gcjax, n, at: gcjax.variance_compress(capacity=n // 100, transport="all_gather", **at),
    ),
    "variance 1/500": (
        "1/500",
        lambda gcjax, n, at: gcjax.variance_compress(capacity=n // 500, transport="all_gather", **at),
    ),
    "variance 1/100 (two_phase)": (
        "1/100",
        lambda gcjax, n, at: gcjax.variance_compress(capacity=n // 100, transport="two_phase", **at),
    ),
    "variance adaptive": ("1/200", lambda gcjax, n, at: gcjax.variance_compress(**at)),
    "top-k 1/100": ("normal", lambda gcjax, n, at: gcjax.top_k_compress(0.01, **at)),
    "PowerSGD 1": ("normal", lambda gcjax, n, at: gcjax.power_sgd_compress(1, key=_key(), **at)),
    "PowerSGD 2": ("normal", lambda gcjax, n, at: gcjax.power_sgd_compress(2, key=_key(), **at)),
    "PowerSGD 4": ("normal", lambda gcjax, n, at: gcjax.power_sgd_compress(4, key=_key(), **at)),
    "1-bit": ("normal", lambda gcjax, n, at: gcjax.onebit_compress(**at)),
}
# The share of entries that pass the criterion of variance_compress in every step. "normal": normal draws.
GRADIENTS = {"normal": None, "1/100": 100, "1/200": 200, "1/500": 500}
SETS = 2  # gradients of each kind, used in turn
FILL = 0.98  # of the fixed capacities
QUIET, CLEAR = 1e-3, 1.0  # magnitude of entries that do not pass, and the least of those that do
SQUARE = 0.01  # of every entry: far above QUIET**2, and summed over the sets still below CLEAR**2

WITHOUT = "without exchange"
ALONE = (WITHOUT, "variance 1/100, without exchange")  # each host as a single worker
# Rows of the whole training step.
TRAINING = {
    WITHOUT: ("normal", lambda gcjax, n, at: gcjax.dense_compress(**at)),
    "variance 1/100, without exchange": ROWS["variance 1/100"],
    **{row: ROWS[row] for row in (PLAIN, "variance 1/100", "PowerSGD 2")},
}


class Worker:
    """Handles the parent's requests (see `child.serve`). Keeps mesh, gradients and the rows that are ready to run."""

    def join(self, host: int, hosts: int, address: str, parameters: int) -> dict:
        take_share(host, hosts)
        import jax

        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", 1)
        limits: dict = {"initialization_timeout": 60, "heartbeat_timeout_seconds": 20, "shutdown_timeout_seconds": 5}
        jax.distributed.initialize(address, hosts, host, **limits)
        self.host, self.hosts, self.parameters = host, hosts, parameters
        self.mesh = jax.make_mesh((hosts,), ("data",))
        self.over, self.same = jax.NamedSharding(self.mesh, jax.P("data")), jax.NamedSharding(self.mesh, jax.P())
        self.runs: dict = {}
        self.states: dict = {}
        self.spare: dict = {}  # the last update, whose buffers the next one gets
        return {"jax": jax.__version__}

    def prepare(self, row: str, alone: bool = False) -> dict:
        """Compile a row. Alone: as a single worker, which computes the same but sends nothing."""
        import jax

        import gcjax

        kind, make = ROWS[row]
        tx = make(gcjax, self.parameters, {} if alone else {"axis_name": "data"})
        params = [jax.ShapeDtypeStruct((COLUMNS, COLUMNS), "float32")] * (self.parameters // COLUMNS**2)
        gradients, squares = self.gradients(kind)
        state = jax.jit(lambda: tx.init(jax.tree.map(lambda s: jax.numpy.zeros(s.shape), params)))()
        if alone:
            gradients, squares = jax.tree.map(lambda x: x.addressable_shards[0].data, (gradients, squares))
        else:
            state = gcjax.distribute(jax.tree.map(jax.device_get, state), self.mesh)

        def update(spare, state, gradient, squares):
            del spare
            extra = {} if squares is None else {"sum_grad_squared": squares}
            return tx.update(gradient, state, **extra)

        if not alone:
            specs = gcjax.state_specs(state)
            data = jax.P("data")
            update = jax.shard_map(
                update, mesh=self.mesh, in_specs=(jax.P(), specs, data, data), out_specs=(jax.P(), specs)
            )
        step = jax.jit(update, donate_argnums=(0, 1), keep_unused=True)
        if alone not in self.spare:
            zeros = jax.jit(
                lambda: [jax.numpy.zeros(s.shape) for s in params], out_shardings=None if alone else self.same
            )
            self.spare[alone] = zeros()
        compiled = step.lower(self.spare[alone], state, gradients[0], squares).compile()
        self.states[row, alone] = state
        turn = 0

        def run():
            nonlocal turn
            out = compiled(self.spare[alone], self.states[row, alone], gradients[turn % SETS], squares)
            self.spare[alone], self.states[row, alone] = jax.block_until_ready(out)
            turn += 1

        self.runs[row, alone] = run
        return {}

    def prepare_collective(self, name: str, kind: str, size: int) -> dict:
        """Compile a single collective of an array of about `size` bytes on every host."""
        import jax
        from jax import lax

        entries = max(size // 4 // self.hosts * self.hosts, 1)
        calls = {
            "scalar_max": (lambda x: lax.pmax(x[0].astype("int32"), "data"), jax.P()),
            "all_reduce": (lambda x: lax.psum(x, "data"), jax.P()),
            "all_gather": (lambda x: lax.all_gather(x, "data", to="invarying"), jax.P()),
            "all_to_all": (lambda x: lax.all_to_all(x.reshape(self.hosts, -1), "data", 0, 0), jax.P("data")),
        }
        call, out = calls[kind]
        dtype = "float32" if kind == "all_reduce" else "uint32"
        x = jax.jit(lambda: jax.numpy.ones(entries * self.hosts, dtype), out_shardings=self.over)()
        step = jax.jit(jax.shard_map(call, mesh=self.mesh, in_specs=jax.P("data"), out_specs=out)).lower(x).compile()
        self.runs[name, False] = lambda: jax.block_until_ready(step(x))
        return {"bytes": 4 * entries}

    def prepare_training(self, row: str) -> dict:
        """Compile a training step of a small transformer: gradient, squares where used, exchange, optimiser."""
        import jax
        import optax

        import gcjax
        from bench.network.model import setup

        loss_fn, params, batch = setup(self.host)
        self.parameters = count = sum(x.size for x in jax.tree.leaves(params))
        _, make = TRAINING[row]
        tx = optax.chain(make(gcjax, count, {"axis_name": "data"}), optax.adam(1e-3))
        mesh, over = self.mesh, self.over
        if row in ALONE:
            mesh = jax.make_mesh((1,), ("data",), devices=jax.local_devices())
            over = jax.NamedSharding(mesh, jax.P("data"))
        step = gcjax.make_train_step(loss_fn, tx, mesh, axis_name="data")
        state = step.init(params)
        batch = jax.make_array_from_process_local_data(over, batch)
        compiled = step.lower(state, batch).compile()
        self.states[row, False] = state.opt_state

        def run():
            nonlocal state
            state, _ = jax.block_until_ready(compiled(state, batch))
            self.states[row, False] = state.opt_state

        self.runs[row, False] = run
        return {"parameters": count}

    def step(self, row: str, at: float, alone: bool = False) -> dict:
        return timed(self.runs[row, alone], at)

    def report(self, row: str) -> dict:
        """What this worker sent in its last step, as the library reports it; for the plain mean, what a ring moves."""
        import gcjax

        if row in ALONE:
            return {"wire_bytes": 0, "overflow": 0}
        if row == PLAIN:
            return {"wire_bytes": 8 * (self.hosts - 1) / self.hosts * self.parameters, "overflow": 0}
        info = gcjax.info(self.states[row, False])
        counts = {name: int(getattr(info, name)[0]) for name in ("selected", "sent", "overflow")}
        return {"wire_bytes": info.wire_bytes, "capacity": info.capacity, **counts}

    def drop(self, row: str, alone: bool) -> dict:
        del self.runs[row, alone], self.states[row, alone]
        return {}

    @functools.cache  # noqa: B019  one Worker lives as long as its process
    def gradients(self, kind: str) -> tuple:
        """Gradients, each a list of matrices, and their squares, on the mesh. Every host draws its own."""
        import jax
        import numpy as np

        rng = np.random.default_rng((self.host, *kind.encode()))
        n, share = self.parameters, GRADIENTS[kind]

        def placed(flat):
            parts = flat.reshape(-1, COLUMNS, COLUMNS)
            return [jax.make_array_from_process_local_data(self.over, part) for part in parts]

        def draw():
            flat = rng.standard_normal(n, np.float32)
            if share is None:
                return placed(flat)
            flat *= QUIET
            count = int(FILL * n / share)
            where = np.arange(count) * n // count + rng.integers(0, n // count, count)  # each in its own part
            flat[where] = rng.choice([-1, 1], count) * rng.uniform(CLEAR, 4 * CLEAR, count)
            return placed(flat)

        return [draw() for _ in range(SETS)], None if share is None else placed(np.full(n, SQUARE, np.float32))


if __name__ == "__main__":
    worker = Worker()
    names = ("join", "prepare", "prepare_collective", "prepare_training", "step", "report", "drop")
    serve({name: getattr(worker, name) for name in names} | {"counters": counters})
