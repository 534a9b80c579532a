"""The cost of one update of every method, alone and with 8 virtual workers, beside the dense mean in the same process.

Compress, exchange and decode are timed together. `variance_compress`, which needs squares, is in `step.py`. Virtual
workers share the machine's cores: their times show what the arithmetic costs, not what a network would save.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable

from bench import machine, provenance

DENSITY = 0.01
WORKERS = 8
WARM_UP = 2
COLUMNS = 1000  # the model is one matrix with this many columns


def methods(axis_name: str | None) -> dict[str, Callable]:
    """Label -> a function that makes the transform."""
    import jax

    import gcjax

    place, key = {"axis_name": axis_name}, {"key": jax.random.key(0)}
    normal_threshold = 2.5758  # exceeded in magnitude by 1/100 of a standard normal's draws
    return {
        "dense float32": lambda: gcjax.dense_compress(**place),
        "dense bfloat16": lambda: gcjax.dense_compress("bfloat16", **place),
        "strom": lambda: gcjax.contrib.strom_compress(normal_threshold, **place),
        "top_k": lambda: gcjax.top_k_compress(DENSITY, **place),
        "drop": lambda: gcjax.contrib.drop_compress(DENSITY, **place),
        "gaussian_k": lambda: gcjax.contrib.gaussian_k_compress(DENSITY, **place),
        "random_k": lambda: gcjax.contrib.random_k_compress(DENSITY, **key, **place),
        "random_k block 64": lambda: gcjax.contrib.random_k_compress(DENSITY, block=64, **key, **place),
        "dryden": lambda: gcjax.contrib.dryden_compress(DENSITY, **place),
        "dgc": lambda: gcjax.dgc_compress(DENSITY, **place),
        "qsgd 4 bits": lambda: gcjax.qsgd_compress(4, **key, **place),
        "terngrad sum": lambda: gcjax.contrib.terngrad_compress(**key, **place),
        "terngrad gather": lambda: gcjax.contrib.terngrad_compress(aggregate="gather", **key, **place),
        "natural": lambda: gcjax.contrib.natural_compress(**key, **place),
        "onebit": lambda: gcjax.onebit_compress(**place),
        "ef_sign": lambda: gcjax.ef_sign_compress(**place),
        "sign_vote": lambda: gcjax.contrib.sign_vote_compress(**place),
        "signum": lambda: gcjax.contrib.signum_compress(**place),
        "power_sgd rank 2": lambda: gcjax.power_sgd_compress(2, **key, **place),
        "power_sgd rank 4": lambda: gcjax.power_sgd_compress(4, **key, **place),
        "sketch": lambda: gcjax.contrib.sketch_compress(DENSITY, **key, **place),
        "demo": lambda: gcjax.contrib.demo_compress(**place),
        "sparse_loco": lambda: gcjax.sparse_loco_compress(**place),
    }


def main() -> None:
    args = options()
    if args.child:
        job = json.loads(args.child)
        print(json.dumps(measure(job) if job["method"] else measure_selection(job)))
        return
    record = provenance.provenance("methods") | {
        "settings": {"repeats": args.repeats, "density": DENSITY, "workers": WORKERS, "malloc": "default"},
        "rows": [],
        "selection": [],
    }
    sizes = [1_000_000] if args.quick else [1_000_000, 10_000_000]
    for size in sizes:
        job = {"size": size, "repeats": args.repeats, "method": None}
        record["selection"].append(machine.run_child("bench.methods", sys.executable, job, "default"))
    names = args.only or list(methods(None))
    cases = [(size, workers, name) for size in sizes for workers in (1, WORKERS) for name in names]
    try:
        for size, workers, method in cases:
            load = machine.load()
            job = {"size": size, "repeats": args.repeats, "method": method, "workers": workers}
            row = machine.run_child("bench.methods", sys.executable, job, "default")
            record["rows"].append({"method": method, "size": size, "workers": workers, "load": load} | row)
            print(f"{method:<18} {size:>10,} x {workers} {row['step_ms']:>8} ms", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: what has been measured is written", file=sys.stderr)
    text = table(record)
    print(text)
    if not (args.quick or args.only):
        provenance.save(provenance.RESULTS, "methods", record, text)


def options() -> argparse.Namespace:
    parser = machine.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1M parameters only; writes no files")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="these rows only; writes no files")
    parser.add_argument("--repeats", type=int, default=9, help="timed calls (default 9)")
    parser.add_argument("--child", metavar="JOB", help="used by the script itself")
    args = parser.parse_args()
    if args.repeats < 3:
        parser.error(f"--repeats must be at least 3, got {args.repeats}")
    if args.only and (unknown := set(args.only) - set(methods(None))):
        parser.error(f"--only: no method {', '.join(sorted(unknown))}; there are {', '.join(methods(None))}")
    return args


class Update:
    """A compiled update that is run on the same gradient and state each time, in the buffers of its last run."""

    def __init__(self, name: str, workers: int, gradient, mesh):
        import jax
        import jax.numpy as jnp

        import gcjax

        axis_name = "data" if workers > 1 else None
        tx = methods(axis_name)[name]()
        state = gcjax.distribute(tx.init(jnp.zeros((len(gradient) // workers, COLUMNS))), mesh)
        step = tx.update
        if axis_name:
            specs = (jax.P("data"), gcjax.state_specs(state))
            step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs)
        self.fresh = (gradient, state)
        begin = time.perf_counter()
        self.compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*self.fresh).compile()
        self.compile_s = time.perf_counter() - begin
        self.used = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))(self.fresh)
        self._refill = jax.jit(
            lambda old, new: jax.tree.map(lambda a, b: (a * 0 + b).astype(b.dtype), old, new), donate_argnums=0
        )

    def seconds(self) -> float:
        import jax

        arguments = jax.block_until_ready(self._refill(self.used, self.fresh))
        begin = time.perf_counter()
        self.used = jax.block_until_ready(self.compiled(*arguments))
        return time.perf_counter() - begin


def measure(job: dict) -> dict:
    """Times of a method's update, the dense mean and the six-stream pass, taken round-robin in this process."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", job["workers"])
    import jax.numpy as jnp

    import gcjax

    workers, size = job["workers"], job["size"]
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over, shape = jax.NamedSharding(mesh, jax.P("data")), (workers * size // COLUMNS, COLUMNS)
    gradient = jax.jit(lambda key: jax.random.normal(key, shape), out_shardings=over)(jax.random.key(1))
    ours, dense = (Update(name, workers, gradient, mesh) for name in (job["method"], "dense float32"))
    add = jax.jit(lambda r, v, g, s: (r + g, v + s), donate_argnums=(0, 1))
    copy = jax.jit(jnp.copy)
    r, v, s = copy(gradient), copy(gradient), copy(gradient)
    steps, denses, passes = [], [], []
    for turn in range(WARM_UP + job["repeats"]):
        dense_time, step_time = dense.seconds(), ours.seconds()
        begin = time.perf_counter()
        r, v = jax.block_until_ready(add(r, v, gradient, s))
        if turn >= WARM_UP:
            passes.append(time.perf_counter() - begin)
            steps.append(step_time)
            denses.append(dense_time)
    info = gcjax.info(ours.used[1])
    return {
        "step_ms": round(1e3 * statistics.median(steps), 2),
        "step_min_ms": round(1e3 * min(steps), 2),
        "dense_ms": round(1e3 * statistics.median(denses), 2),
        "over_dense": round(statistics.median(steps) / statistics.median(denses), 2),
        "pass_ms": round(1e3 * statistics.median(passes), 2),
        "over_pass": round(statistics.median(steps) / statistics.median(passes), 2),
        "over_pass_minima": round(min(steps) / min(passes), 2),
        "sent": int(info.sent.mean()),
        "bits_per_entry": round(float(info.payload_bits.mean()) / size, 4),
        "wire_ratio": round(info.wire_ratio, 2) if workers > 1 else None,
        "temporaries_over_n": round(ours.compiled.memory_analysis().temp_size_in_bytes / 4 / size, 2),
        "compile_s": round(ours.compile_s, 1),
    }


def measure_selection(job: dict) -> dict:
    """The k largest of N by `lax.top_k` as indices, and by the threshold search as a packed mask."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    import jax.numpy as jnp

    from gcjax._kernels.bits import position_of, to_blocks
    from gcjax._sparse.compaction import assign_slots, slot_indices
    from gcjax._sparse.selection import top_k_mask

    size = job["size"]
    k = round(size * DENSITY)
    x = to_blocks(jax.random.normal(jax.random.key(0), (size,)))
    theirs = jax.jit(lambda x: jax.lax.top_k(jnp.abs(x.reshape(-1)), k)[1])
    ours = jax.jit(lambda x: position_of(slot_indices(assign_slots(top_k_mask(x, k)), k)))
    if set(ours(x).tolist()) != set(theirs(x).tolist()):
        raise SystemExit("lax.top_k and the threshold search select different entries")
    times: dict = {"lax": [], "search": []}
    for _ in range(job["repeats"]):
        for name, run in (("lax", theirs), ("search", ours)):
            begin = time.perf_counter()
            jax.block_until_ready(run(x))
            times[name].append(time.perf_counter() - begin)
    lax, search = (statistics.median(times[name]) for name in ("lax", "search"))
    return {
        "size": size,
        "k": k,
        "lax_top_k_ms": round(1e3 * lax, 2),
        "search_ms": round(1e3 * search, 2),
        "ratio": round(lax / search, 1),
        "ratio_of_minima": round(min(times["lax"]) / min(times["search"]), 1),
    }


def table(record: dict) -> str:
    """Markdown."""
    lines = [
        provenance.machine_line(record),
        provenance.versions_line(record),
        f"Milliseconds, medians (minima). One leaf of {COLUMNS} columns; sparse methods at density {DENSITY}.",
        "",
        "| method | N | step, 1 worker | / pass | of minima | temporaries / N words | bits / entry "
        f"| step, {WORKERS} workers | / dense | wire ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    by_case = {(row["method"], row["size"], row["workers"]): row for row in record["rows"]}
    for (method, size, workers), one in by_case.items():
        if workers != 1:
            continue
        many = by_case.get((method, size, WORKERS))
        cells = [
            method,
            f"{size // 1_000_000}M",
            f"{one['step_ms']:.1f} ({one['step_min_ms']:.1f})",
            one["over_pass"],
            one["over_pass_minima"],
            one["temporaries_over_n"],
            one["bits_per_entry"],
        ]
        if many:
            cells += [f"{many['step_ms']:.1f} ({many['step_min_ms']:.1f})", many["over_dense"], many["wire_ratio"]]
        else:
            cells += ["-"] * 3
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines.append("")
    for row in record["selection"]:
        lines.append(
            f"The {row['k']:,} largest of {row['size']:,}: `lax.top_k` {row['lax_top_k_ms']} ms, threshold search "
            f"{row['search_ms']} ms, {row['ratio']} times faster ({row['ratio_of_minima']} by minima)."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
