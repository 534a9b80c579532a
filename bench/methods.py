"""What one update of every method costs, alone and with 8 virtual workers, beside the dense mean in the same process.

Compress, exchange and decode are timed together. `variance_compress`, which needs squares, is in `step.py`. Virtual
workers share the machine's cores: their times say what the arithmetic costs, not what a network would save.
"""

import argparse
import json
import os
import statistics
import sys
import time

import _machine

DENSITY = 0.01
WORKERS = 8
WARM_UP = 2
COLUMNS = 1000  # the model is one matrix of so many columns


def methods(axis_name) -> dict:
    """Label -> a function that makes the transform."""
    import jax

    import gcjax

    place, key = {"axis_name": axis_name}, {"key": jax.random.key(0)}
    normal_threshold = 2.5758  # exceeded in magnitude by 1/100 of a standard normal's draws
    return {
        "dense float32": lambda: gcjax.dense_compress(**place),
        "dense bfloat16": lambda: gcjax.dense_compress("bfloat16", **place),
        "strom": lambda: gcjax.strom_compress(normal_threshold, **place),
        "top_k": lambda: gcjax.top_k_compress(DENSITY, **place),
        "drop": lambda: gcjax.drop_compress(DENSITY, **place),
        "gaussian_k": lambda: gcjax.gaussian_k_compress(DENSITY, **place),
        "sidco": lambda: gcjax.sidco_compress(DENSITY, **place),
        "random_k": lambda: gcjax.random_k_compress(DENSITY, **key, **place),
        "random_k block 64": lambda: gcjax.random_k_compress(DENSITY, block=64, **key, **place),
        "dryden": lambda: gcjax.dryden_compress(DENSITY, **place),
        "dgc": lambda: gcjax.dgc_compress(DENSITY, **place),
        "ef21": lambda: gcjax.ef21_compress(DENSITY, **place),
        "qsgd 4 bits": lambda: gcjax.qsgd_compress(4, **key, **place),
        "terngrad sum": lambda: gcjax.terngrad_compress(**key, **place),
        "terngrad gather": lambda: gcjax.terngrad_compress(aggregate="gather", **key, **place),
        "natural": lambda: gcjax.natural_compress(**key, **place),
        "onebit": lambda: gcjax.onebit_compress(**place),
        "ef_sign": lambda: gcjax.ef_sign_compress(**place),
        "sign_vote": lambda: gcjax.sign_vote_compress(**place),
        "signum": lambda: gcjax.signum_compress(**place),
        "drive": lambda: gcjax.drive_compress(**key, **place),
        "power_sgd rank 2": lambda: gcjax.power_sgd_compress(2, **key, **place),
        "power_sgd rank 4": lambda: gcjax.power_sgd_compress(4, **key, **place),
        "sketch": lambda: gcjax.sketch_compress(DENSITY, **key, **place),
        "demo": lambda: gcjax.demo_compress(**place),
    }


def main():
    args = options()
    if args.child:
        print(json.dumps(job(json.loads(args.child))))
        return
    record = _machine.provenance() | {
        "settings": {"repeats": args.repeats, "density": DENSITY, "workers": WORKERS, "malloc": "default"},
        "rows": [],
        "selection": [],
    }
    sizes = [1_000_000] if args.quick else [1_000_000, 10_000_000]
    for size in sizes:
        request = {"size": size, "repeats": args.repeats, "method": None}
        record["selection"].append(_machine.run_child(sys.executable, request, "default"))
    names = args.only or list(methods(None))
    cases = [(size, workers, name) for size in sizes for workers in (1, WORKERS) for name in names]
    try:
        for size, workers, method in cases:
            load = round(os.getloadavg()[0], 1)
            request = {"size": size, "repeats": args.repeats, "method": method, "workers": workers}
            row = _machine.run_child(sys.executable, request, "default")
            record["rows"].append({"method": method, "size": size, "workers": workers, "load": load} | row)
            print(f"{method:<18} {size:>10,} x {workers} {row['step_ms']:>8} ms", file=sys.stderr)
    except KeyboardInterrupt:
        print("interrupted: what is measured by now is written", file=sys.stderr)
    text = table(record)
    print(text)
    if not (args.quick or args.only):
        _machine.RESULTS.mkdir(parents=True, exist_ok=True)
        (_machine.RESULTS / "methods.json").write_text(json.dumps(record, indent=1) + "\n")
        (_machine.RESULTS / "methods.md").write_text(text + "\n")


def options() -> argparse.Namespace:
    parser = _machine.Parser(description=__doc__.splitlines()[0])
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


def job(job) -> dict:
    import jax

    jax.config.update("jax_platforms", "cpu")
    if job["method"] is None:
        return selection(job)
    jax.config.update("jax_num_cpu_devices", job["workers"])
    import jax.numpy as jnp

    import gcjax

    workers, size = job["workers"], job["size"]
    axis_name = "data" if workers > 1 else None
    mesh = jax.make_mesh((workers,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    over = jax.NamedSharding(mesh, jax.P("data"))
    shape = (workers * size // COLUMNS, COLUMNS)
    original = jax.jit(lambda key: jax.random.normal(key, shape), out_shardings=over)(jax.random.key(1))
    refill = jax.jit(
        lambda old, new: jax.tree.map(lambda a, b: (a * 0 + b).astype(b.dtype), old, new), donate_argnums=0
    )

    def prepare(name):
        tx = methods(axis_name)[name]()
        state = gcjax.place(tx.init(jnp.zeros((size // COLUMNS, COLUMNS))), mesh)
        step = tx.update
        if axis_name:
            specs = (jax.P("data"), gcjax.state_specs(state))
            step = jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=specs)
        fresh = (original, state)
        begin = time.perf_counter()
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*fresh).compile()
        return compiled, fresh, time.perf_counter() - begin

    def timed(compiled, fresh, used):
        """Run on gradient and state as at the start, in the buffers of the last run; return seconds and results."""
        arguments = jax.block_until_ready(refill(used, fresh))
        begin = time.perf_counter()
        used = jax.block_until_ready(compiled(*arguments))
        return time.perf_counter() - begin, used

    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    ours, fresh, compile_s = prepare(job["method"])
    dense, dense_fresh, _ = prepare("dense float32")
    used, dense_used = copy(fresh), copy(dense_fresh)
    add = jax.jit(lambda r, v, g, s: (r + g, v + s), donate_argnums=(0, 1))
    r, v, g = copy(original), copy(original), copy(original)
    steps, denses, passes = [], [], []
    for turn in range(WARM_UP + job["repeats"]):
        dense_time, dense_used = timed(dense, dense_fresh, dense_used)
        step_time, used = timed(ours, fresh, used)
        begin = time.perf_counter()
        r, v = jax.block_until_ready(add(r, v, original, g))
        if turn >= WARM_UP:
            passes.append(time.perf_counter() - begin)
            steps.append(step_time)
            denses.append(dense_time)
    info = gcjax.info(used[1])
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
        "temporaries_over_n": round(ours.memory_analysis().temp_size_in_bytes / 4 / size, 2),
        "compile_s": round(compile_s, 1),
    }


def selection(job) -> dict:
    """The k largest of N by `lax.top_k` and by the threshold search, as indices and as a mask of words."""
    import jax
    import jax.numpy as jnp

    from gcjax._sparse import compaction, selection

    size = job["size"]
    k = round(size * DENSITY)
    x = jax.random.normal(jax.random.key(0), (size,))
    theirs = jax.jit(lambda x: jax.lax.top_k(jnp.abs(x), k)[1])
    ours = jax.jit(
        lambda x: compaction.slot_indices(compaction.assign_slots(selection.top_k_mask(x, k), jnp.int32(0)), k)
    )
    if set(ours(x).tolist()) != set(theirs(x).tolist()):
        raise SystemExit("the two selections differ")
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


def table(record) -> str:
    machine, versions = record["machine"], ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    lines = [
        f"{machine['cpu']} ({machine['architecture']}), {machine['cores']} cores, {machine['memory_gb']} GB.",
        f"{versions}; commit {record['commit'][:12]}, sources {record['source']}; `{record['command']}`.",
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
            *(
                [f"{many['step_ms']:.1f} ({many['step_min_ms']:.1f})", many["over_dense"], many["wire_ratio"]]
                if many
                else "---"
            ),
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    lines.append("")
    for row in record["selection"]:
        lines.append(
            f"The {row['k']:,} largest of {row['size']:,}: `lax.top_k` {row['lax_top_k_ms']} ms, threshold search "
            f"{row['search_ms']} ms, {row['ratio']} times faster ({row['ratio_of_minima']} of minima)."
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
