"""Time of one whole update of `gcjax.variance_compress` on one worker, as a multiple of a plain pass over the arrays.

The update accumulates, selects, compacts, packs, resets and decodes. It is timed alternately with the six-stream pass
`r + g`, `v + s` (four reads, two writes, in place) in one process. The same step written in PyTorch runs in processes
of its own. Both sides run with glibc's default malloc and with one that keeps freed memory. The density is exact:
alpha = 1, normal gradients, a fresh state before each call, and constant squares z**2 with P(|g| > z) = density.

A second table has the update on virtual workers with the checks of every update, `gcjax._core.symptoms`, and without.
`--whole` measures whole training steps instead: see `bench/whole.py`.
"""

import argparse
import json
import statistics
import sys
import time
from unittest import mock

from bench import machine, provenance, whole

SIZES = (1_000_000, 10_000_000, 25_000_000)
DENSITIES = (10, 100, 1000)  # one entry in this many is sent
MANY_LEAVES = 160
WAIT_POLICIES = ("ACTIVE", "PASSIVE")  # of PyTorch's OpenMP threads: the first is faster only on an idle machine
WARM_UP = 5
DECAY = 0.999
CHECKED = [(10_000_000, 1), (10_000_000, MANY_LEAVES)]  # parameters and leaves with which the checks are timed
WORKERS = 2  # then


def main() -> None:
    args = options()
    if args.child:
        job = json.loads(args.child)
        jobs = {"jax": jax_job, "torch": torch_job, "checks": checks_job, "whole": whole.job, "compile": whole.job}
        print(json.dumps(jobs[job["side"]](job)))
        return
    if args.whole:
        whole.main(args)
        return
    if args.checks:
        print(checks_table([measure_checks(*case, args) for case in CHECKED]))
        return
    torch_python = machine.find_torch(args.torch_python)
    sizes = SIZES[:1] if args.quick else SIZES
    cases = [(size, 1, density) for size in sizes for density in DENSITIES]
    if not args.quick:
        cases.append((10_000_000, MANY_LEAVES, 100))
    record = provenance.provenance("step") | {
        "settings": {"repeats": args.repeats, "rounds": args.rounds, "warm_up": WARM_UP, "malloc": machine.MALLOC},
        "rows": [],
    }
    for size, leaves, density in cases:
        for malloc in machine.MALLOC:
            row = measure(size, leaves, density, malloc, torch_python, args)
            record["rows"].append(row)
            print(f"{size:>10,} {leaves:>2} 1/{density:<4} {malloc:<7} {row['jax']['ratio']:.2f}", file=sys.stderr)
    record["checks"] = [] if args.quick else [measure_checks(*case, args) for case in CHECKED]
    if torch_python:
        record["versions"]["torch"] = record["rows"][0]["torch"]["version"]
    text = table(record)
    print(text)
    if not args.quick:
        provenance.save(provenance.RESULTS, "step", record, text)


def options() -> argparse.Namespace:
    parser = machine.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="1M parameters only; writes no files")
    parser.add_argument("--checks", action="store_true", help="the table of the checks only; writes no files")
    parser.add_argument("--whole", action="store_true", help="what the criterion adds to whole training steps")
    help_text = "of --whole: only these; the others stay to be measured"
    parser.add_argument("--targets", nargs="+", choices=("cpu", *whole.TARGETS), help=help_text)
    parser.add_argument("--repeats", type=int, default=15, help="timed calls in a process (default 15)")
    parser.add_argument(
        "--rounds", type=int, default=2, help="processes for each row and side, alternating (default 2)"
    )
    parser.add_argument("--torch-python", type=machine.interpreter, metavar="PATH", help=machine.TORCH_HELP)
    parser.add_argument("--child", metavar="JOB", help="used by the script itself")
    args = parser.parse_args()
    if args.repeats < 3 or args.rounds < 1:
        parser.error(f"--repeats must be at least 3 and --rounds at least 1, got {args.repeats} and {args.rounds}")
    return args


def measure(
    size: int, leaves: int, density: int, malloc: str, torch_python: str | None, args: argparse.Namespace
) -> dict:
    """One row: both sides alternate, and the times of all rounds are pooled. PyTorch gets the better wait policy."""
    job = {"size": size, "leaves": leaves, "density": density, "repeats": args.repeats}
    load = machine.load()  # about 2 of it are this benchmark's
    ours, theirs = [], {policy: [] for policy in WAIT_POLICIES}
    for _ in range(args.rounds):
        ours.append(machine.run_child("bench.step", sys.executable, job | {"side": "jax"}, malloc))
        if torch_python:
            for policy, runs in theirs.items():
                child, variables = job | {"side": "torch"}, {"OMP_WAIT_POLICY": policy}
                runs.append(machine.run_child("bench.step", torch_python, child, malloc, variables))
    jax = summary(ours)
    row = {"size": size, "leaves": leaves, "density": f"1/{density}", "malloc": malloc, "load": load, "jax": jax}
    if torch_python:
        by_policy = [summary(runs) | {"wait_policy": policy} for policy, runs in theirs.items()]
        torch = min(by_policy, key=lambda of_policy: of_policy["median_ms"])
        row["torch"] = torch
        row["torch_over_jax"] = round(torch["median_ms"] / jax["median_ms"], 2)
        row["torch_over_jax_minima"] = round(min(t["min_ms"] for t in by_policy) / jax["min_ms"], 2)
    return row


def measure_checks(size: int, leaves: int, args: argparse.Namespace) -> dict:
    """A row of the second table: the times of all rounds pooled."""
    job = {"side": "checks", "size": size, "leaves": leaves, "density": 100, "repeats": args.repeats}
    load = machine.load()
    runs = [machine.run_child("bench.step", sys.executable, job, "default") for _ in range(args.rounds)]
    checked, bare = ([t for run in runs for t in run[name]] for name in ("checked_s", "bare_s"))
    return {
        "size": size,
        "leaves": leaves,
        "workers": WORKERS,
        "checked_median_ms": round(1e3 * statistics.median(checked), 2),
        "checked_min_ms": round(1e3 * min(checked), 2),
        "bare_median_ms": round(1e3 * statistics.median(bare), 2),
        "bare_min_ms": round(1e3 * min(bare), 2),
        "ratio": round(statistics.median(checked) / statistics.median(bare), 3),
        "ratio_of_minima": round(min(checked) / min(bare), 3),
        "load": load,
    }


def summary(runs: list[dict]) -> dict:
    """Figures of a row from all its processes' times."""
    step, plain = ([t for run in runs for t in run.pop(name)] for name in ("step_s", "pass_s"))
    return {
        "median_ms": round(1e3 * statistics.median(step), 2),
        "min_ms": round(1e3 * min(step), 2),
        "pass_median_ms": round(1e3 * statistics.median(plain), 2),
        "pass_min_ms": round(1e3 * min(plain), 2),
        "ratio": round(statistics.median(step) / statistics.median(plain), 2),
        "ratio_of_minima": round(min(step) / min(plain), 2),
        **runs[0],
    }


def table(record: dict) -> str:
    """Markdown."""
    lines = [
        provenance.machine_line(record),
        provenance.versions_line(record),
        "Milliseconds, medians (minima).",
        "",
        "| N | leaves | density | malloc | step | pass | step / pass | of minima | temporaries / N words | compile s "
        "| torch step | torch / gcjax | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in record["rows"]:
        jax, torch = row["jax"], row.get("torch")
        beside = ["-", "-"]
        if torch:
            beside[0] = f"{torch['median_ms']:.1f} ({torch['min_ms']:.1f})"
            beside[1] = f"{row['torch_over_jax']} ({row['torch_over_jax_minima']})"
        cells = [
            f"{row['size'] // 1_000_000}M",
            row["leaves"],
            row["density"],
            row["malloc"],
            f"{jax['median_ms']:.1f} ({jax['min_ms']:.1f})",
            f"{jax['pass_median_ms']:.1f} ({jax['pass_min_ms']:.1f})",
            jax["ratio"],
            jax["ratio_of_minima"],
            jax["temporaries_over_n"],
            jax["compile_s"],
            *beside,
            row["load"],
        ]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    if record["checks"]:
        lines += ["", checks_table(record["checks"])]
    return "\n".join(lines)


def checks_table(rows: list[dict]) -> str:
    """Markdown."""
    lines = [
        f"{WORKERS} virtual workers, 1/100 is sent. The update with the checks that it makes, and without, in turns.",
        "",
        "| N | leaves | with | without | with / without | of minima | load |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        times = [f"{row[f'{name}_median_ms']:.1f} ({row[f'{name}_min_ms']:.1f})" for name in ("checked", "bare")]
        cells = [f"{row['size'] // 1_000_000}M", row["leaves"], *times]
        cells += [row["ratio"], row["ratio_of_minima"], row["load"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def threshold_for(density: int) -> float:
    """z with P(|g| > z) = 1 / density for a standard normal g."""
    return -statistics.NormalDist().inv_cdf(0.5 / density)


def check_sent(sent: int, job: dict) -> None:
    share = 1 / job["density"]
    expected, error = job["size"] * share, (job["size"] * share * (1 - share)) ** 0.5
    if abs(sent - expected) > 6 * error:
        raise SystemExit(f"{sent} entries were sent instead of {expected:.0f}: the density is not 1/{job['density']}")


def jax_job(job: dict) -> dict:
    """Times of update and pass in this process."""
    import jax
    import jax.numpy as jnp

    import gcjax

    size, leaves = job["size"], job["leaves"]
    tx = gcjax.variance_compress(alpha=1.0, decay=DECAY)
    keys = jax.random.split(jax.random.key(0), leaves)
    gradient = {f"leaf{i:02}": jax.random.normal(key, (size // leaves,)) for i, key in enumerate(keys)}
    squares = jax.tree.map(lambda g: jnp.full(g.shape, threshold_for(job["density"]) ** 2), gradient)

    def step(g, s, state):
        updates, state = tx.update(g, state, sum_grad_squared=s)
        return updates, s, state  # in the order of the donated inputs: each output takes its input's buffer

    def add(r, v, g, s):
        return jax.tree.map(jnp.add, (r, v), (g, s))

    step = jax.jit(step, donate_argnums=(0, 1, 2))
    add = jax.jit(add, donate_argnums=(0, 1))
    zero = jax.jit(lambda state: jax.tree.map(lambda x: x * 0, state), donate_argnums=0)
    refill = jax.jit(lambda old, new: jax.tree.map(lambda a, b: a * 0 + b, old, new), donate_argnums=0)
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))

    start = tx.init(gradient)
    state = copy(start)
    begin = time.perf_counter()
    compiled = step.lower(gradient, squares, state).compile()
    compile_s = time.perf_counter() - begin
    g, s, r, v = copy(gradient), squares, zero(copy(gradient)), zero(copy(gradient))
    steps, passes = [], []
    for turn in range(WARM_UP + job["repeats"]):
        state, g = jax.block_until_ready((refill(state, start), refill(g, gradient)))
        begin = time.perf_counter()
        r, v = jax.block_until_ready(add(r, v, g, s))
        middle = time.perf_counter()
        g, s, state = jax.block_until_ready(compiled(g, s, state))
        end = time.perf_counter()
        if turn >= WARM_UP:
            passes.append(middle - begin)
            steps.append(end - middle)
    info = gcjax.info(state)
    check_sent(int(info.sent[0]), job)
    words = compiled.memory_analysis().temp_size_in_bytes / 4
    return {
        "step_s": steps,
        "pass_s": passes,
        "sent": int(info.sent[0]),
        "overflow": int(info.overflow[0]),
        "capacity": info.capacity,
        "temporaries_over_n": round(words / size, 3),
        "compile_s": round(compile_s, 1),
    }


def checks_job(job: dict) -> dict:
    """Times of the update on virtual workers with the checks and without, in turns."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import PartitionSpec as P

    import gcjax
    from gcjax._core.symptoms import Symptoms

    jax.config.update("jax_num_cpu_devices", WORKERS)
    mesh = jax.make_mesh((WORKERS,), ("data",), (jax.sharding.AxisType.Auto,))
    of_workers = jax.NamedSharding(mesh, P("data"))
    length, leaves = job["size"] // job["leaves"], job["leaves"]
    tx = gcjax.variance_compress(alpha=1.0, decay=DECAY, axis_name="data")
    start = gcjax.distribute(tx.init([jnp.zeros(length)] * leaves), mesh)
    specs = gcjax.state_specs(start)
    keys = jax.random.split(jax.random.key(0), leaves)
    gradient = jax.device_put([jax.random.normal(key, (WORKERS * length,)) for key in keys], of_workers)
    squares = [jnp.full_like(g, threshold_for(job["density"]) ** 2) for g in gradient]

    def lowered():
        def update(g, s, state):
            return tx.update(g, state, sum_grad_squared=s)

        on_mesh = jax.shard_map(update, mesh=mesh, in_specs=(P("data"), P("data"), specs), out_specs=(P(), specs))
        return jax.jit(on_mesh, donate_argnums=2).lower(gradient, squares, start)

    programs = {"checked_s": lowered()}
    with mock.patch.multiple(
        Symptoms,
        claims=lambda self, gradients, squares, comm: jnp.zeros(4, jnp.int32),
        after=lambda self, largest, comm: self,
        agreed_on=staticmethod(lambda largest, flag: flag),
    ):
        programs["bare_s"] = lowered()
    if programs["checked_s"].as_text() == programs["bare_s"].as_text():
        raise SystemExit("the program without the checks is the one with them: update this script")
    programs = {name: program.compile() for name, program in programs.items()}
    copy = jax.jit(lambda tree: jax.tree.map(jnp.copy, tree))
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(WARM_UP + job["repeats"]):
        for name in sorted(programs, reverse=turn % 2 > 0):
            state = jax.block_until_ready(copy(start))
            begin = time.perf_counter()
            _, state = jax.block_until_ready(programs[name](gradient, squares, state))
            if turn >= WARM_UP:
                times[name].append(time.perf_counter() - begin)
            check_sent(int(gcjax.info(state).sent[0]), job)
    return times


def torch_job(job: dict) -> dict:
    """The same of the step written in PyTorch."""
    import torch

    torch.manual_seed(0)
    size, leaves = job["size"], job["leaves"]
    gradient = [torch.randn(size // leaves) for _ in range(leaves)]
    squares = [torch.full_like(g, threshold_for(job["density"]) ** 2) for g in gradient]
    g, r, v, r_pass, v_pass, scratch = ([torch.zeros_like(x) for x in gradient] for _ in range(6))
    steps, passes = [], []
    with torch.no_grad():
        for turn in range(WARM_UP + job["repeats"]):
            for i in range(leaves):
                r[i].zero_()
                v[i].zero_()
                g[i].copy_(gradient[i])
            begin = time.perf_counter()
            for i in range(leaves):
                r_pass[i].add_(g[i])
                v_pass[i].add_(squares[i])
            middle = time.perf_counter()
            sent = sum(torch_step(g[i], squares[i], r[i], v[i], scratch[i]) for i in range(leaves))
            end = time.perf_counter()
            if turn >= WARM_UP:
                passes.append(middle - begin)
                steps.append(end - middle)
    check_sent(sent, job)
    return {
        "step_s": steps,
        "pass_s": passes,
        "sent": sent,
        "threads": torch.get_num_threads(),
        "version": torch.__version__,
    }


def torch_step(g, s, r, v, scratch, alpha: float = 1.0) -> int:
    """Overwrite the tensor `g` with the update of one leaf, and return the number of entries sent.

    In place where torch can. No finite check, no capacity.
    """
    import torch

    r.add_(g)
    v.add_(s)
    mask = torch.mul(r, r, out=scratch).sub_(v, alpha=alpha) > 0
    index = mask.nonzero().squeeze(1)
    bits = r[index].view(torch.int32)
    magnitude = bits & 0x7FFFFFFF
    top = (magnitude.max() >> 23) if len(index) else 0
    below = (top - ((magnitude + 0x400000) >> 23)).clamp_(min=0)
    fits = below <= 7
    if not bool(fits.all()):  # entries too small for three bits of exponent stay in r
        index, bits, below = index[fits], bits[fits], below[fits]
    words = (bits & -0x80000000) | (below << 28) | index.to(torch.int32)
    r.index_fill_(0, index, 0.0)
    v.mul_(DECAY).index_fill_(0, index, 0.0)

    received = words & 0x0FFFFFFF
    values = ((top - ((words >> 28) & 7)) << 23 | (words & -0x80000000)).view(torch.float32)
    g.zero_().index_add_(0, received, values)
    return len(index)


if __name__ == "__main__":
    main()
