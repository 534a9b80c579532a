"""Squares of groups of samples against those of all samples: time, and what the criterion decides.

One worker trains with Adam and sends nothing. Beside it every setting keeps the two sums of `variance_compress` of its
own, and empties an entry of them where its criterion lets it pass. With it goes the sum of the exact squares over the
same steps. A pass is false if that sum would not have let the entry pass at that moment, and an entry is missed if it
alone would have. A share of the samples stands beside the groups: every eighth sample, say, counts eight times, from
an offset that the step draws.

    python -m bench.groups --data DIR --text FILE     # CIFAR-10 and a text, ten minutes
"""

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import machine, provenance

SAMPLES = 64
GROUPS, PARTS = (2, 4, 8, 16), (2, 4, 8, 16)
ALPHAS = (0.5, 1.5)
DECAY = 0.999
EVALUATED = 20  # the last steps, over which decisions are counted
Setting = tuple[str, int | None]  # ("groups", 4), ("share", 8) for one in 8, ("groups", None) for all samples
EXACT: Setting = ("groups", None)
SETTINGS: tuple[Setting, ...] = (EXACT, *(("groups", g) for g in GROUPS), *(("share", p) for p in PARTS))


def name_of(setting: Setting) -> str:
    kind, number = setting
    return "all samples" if number is None else f"{number} groups" if kind == "groups" else f"1/{number} of the samples"


def task_of(model: str, path: Path) -> tuple[Callable, Any, Iterator]:
    """Loss of parameters and batch, parameters, and batches of `SAMPLES`."""
    sys.path.insert(0, str(machine.ROOT / "examples"))
    import jax

    common = f"--workers 1 --batch {SAMPLES} --epochs 1000"
    if model == "CNN":
        import cifar10
        from common.images import load_cifar10

        args = cifar10.parse_options([*common.split(), "--data", str(path)])
        task = cifar10.make_task(args, load_cifar10(path))
        prepare = jax.jit(task.prepare)
        batches = (prepare(jax.random.key(i), batch) for i, batch in enumerate(task.batches(0)))
    else:
        import char_lm
        from common.text import load_text

        args = char_lm.parse_options([*common.split(), "--text", str(path)])
        task = char_lm.make_task(args, *load_text(path, args.context))
        batches = task.batches(0)
    params, _ = jax.jit(task.init)(jax.random.key(0))
    return lambda params, batch: task.loss(params, batch, jax.random.key(0)), params, batches


def squares_of(setting: Setting, loss: Callable, params: Any, batch: Any, offset: Any) -> Any:
    """The estimate of a setting."""
    import jax

    import gcjax

    kind, number = setting
    if kind == "groups":
        return gcjax.value_and_moments(loss, groups=number)(params, batch)[1].sum_grad_squared
    part = jax.tree.map(lambda x: x.reshape(-1, number, *x.shape[1:])[:, offset % number], batch)
    squares = gcjax.value_and_moments(loss)(params, part)[1].sum_grad_squared
    return jax.tree.map(lambda s: s / number, squares)  # (g / 8)^2 of 8 samples, for (g / 64)^2 of 64


def decisions(loss: Callable, params: Any, batches: Iterator, steps: int) -> dict[str, dict]:
    """For each setting and alpha: what passes, falsely passes and is missed, over the last steps."""
    import jax
    import jax.numpy as jnp
    import optax

    import gcjax

    tx = optax.adam(2e-3)

    def follow(sums, gradient, squares, exact, alpha):
        r, v, known = (jax.tree.map(jnp.add, a, b) for a, b in zip(sums, (gradient, squares, exact), strict=True))
        passed = jax.tree.map(lambda r, v: r * r > alpha * v, r, v)
        right = jax.tree.map(lambda r, v: r * r > alpha * v, r, known)
        counts = [
            sum(jnp.sum(mask) for mask in jax.tree.leaves(jax.tree.map(of, passed, right, v)))
            for of in (
                lambda p, e, v: p,
                lambda p, e, v: p & ~e,
                lambda p, e, v: e,
                lambda p, e, v: e & ~p,
                lambda p, e, v: p & ~e & (v == 0),
            )
        ]
        kept = [jax.tree.map(lambda x, p: jnp.where(p, 0, x), tree, passed) for tree in (r, v, known)]
        return [kept[0], *(jax.tree.map(lambda x: DECAY * x, tree) for tree in kept[1:])], counts

    @jax.jit
    def step(params, opt_state, sums, batch, number):
        _, (gradient, exact) = gcjax.value_and_moments(loss)(params, batch)
        new, found = {}, {}
        for setting in SETTINGS:
            offset = jax.random.randint(jax.random.fold_in(jax.random.key(1), number), (), 0, 64)
            squares = exact if setting == EXACT else squares_of(setting, loss, params, batch, offset)
            for alpha in ALPHAS:
                key = f"{name_of(setting)}, {alpha}"
                new[key], found[key] = follow(sums[key], gradient, squares, exact, alpha)
        updates, opt_state = tx.update(gradient, opt_state)
        return optax.apply_updates(params, updates), opt_state, new, found

    zeros = jax.tree.map(jnp.zeros_like, params)
    sums = {f"{name_of(setting)}, {alpha}": [zeros] * 3 for setting in SETTINGS for alpha in ALPHAS}
    opt_state, counted = tx.init(params), []
    for number in range(steps):
        params, opt_state, sums, found = step(params, opt_state, sums, next(batches), number)
        if number >= steps - EVALUATED:
            counted.append(jax.tree.map(int, found))
    size = EVALUATED * sum(x.size for x in jax.tree.leaves(params))
    rows = {}
    for key in counted[0]:
        passed, false, wanted, missed, unknown = (sum(c[key][i] for c in counted) for i in range(5))
        rows[key] = {
            "passed": round(passed / size, 4),
            "false": round(false / max(passed, 1), 4),
            "missed": round(missed / max(wanted, 1), 4),
            "false_without_square": round(unknown / max(passed, 1), 4),
        }
    return rows


def times(loss: Callable, params: Any, batch: Any, rounds: int) -> dict[str, dict]:
    """Gradient and squares of each number of groups against the plain gradient, in turns."""
    import jax

    import gcjax

    programs = {"plain": jax.value_and_grad(loss)}
    for setting in SETTINGS:
        if setting[0] == "groups":
            programs[name_of(setting)] = gcjax.value_and_moments(loss, groups=setting[1])
    compiled = {name: jax.jit(fn).lower(params, batch).compile() for name, fn in programs.items()}
    measured: dict[str, list[float]] = {name: [] for name in compiled}
    for turn in range(rounds + 2):
        for name, fn in compiled.items():
            begin = time.perf_counter()
            jax.block_until_ready(fn(params, batch))
            if turn > 1:
                measured[name].append(time.perf_counter() - begin)
    plain = measured["plain"]
    return {
        name: {
            "median_ms": round(1e3 * statistics.median(found), 1),
            "min_ms": round(1e3 * min(found), 1),
            "ratio": round(statistics.median(a / b for a, b in zip(found, plain, strict=True)), 3),
        }
        for name, found in measured.items()
    }


def measure(job: dict) -> dict:
    loss, params, batches = task_of(job["model"], Path(job["path"]))
    found = times(loss, params, next(batches), job["rounds"])
    return {"model": job["model"], "times": found, "decisions": decisions(loss, params, batches, job["steps"])}


def table(record: dict) -> str:
    """Markdown."""
    lines = [provenance.machine_line(record), provenance.versions_line(record)]
    for row in record["rows"]:
        lines += [
            "",
            f"**{row['model']}**, {SAMPLES} samples. Squares and gradient as a multiple of the plain gradient "
            f"({row['times']['plain']['median_ms']} ms); of the entries that pass after "
            f"{record['settings']['steps']} steps, those that pass falsely; of those that should, the missed ones.",
            "",
            "| squares of | time | " + " | ".join(f"alpha {a}: passed % | false % | missed %" for a in ALPHAS) + " |",
            "|---" * (2 + 3 * len(ALPHAS)) + "|",
        ]
        for setting in SETTINGS:
            name = name_of(setting)
            cells = [name, str(row["times"].get(name, {}).get("ratio", "-"))]
            for alpha in ALPHAS:
                found = row["decisions"][f"{name}, {alpha}"]
                cells += [f"{100 * found[column]:.1f}" for column in ("passed", "false", "missed")]
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = machine.Parser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", type=Path, help="folder with CIFAR-10, as for examples/cifar10.py")
    parser.add_argument("--text", type=Path, help="file to learn from, as for examples/char_lm.py")
    parser.add_argument("--steps", type=int, default=100, help="steps of training (default 100)")
    parser.add_argument("--rounds", type=int, default=9, help="timed calls (default 9)")
    parser.add_argument("--child", metavar="JOB", help="used by the script itself")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(json.loads(args.child))))
        return
    if args.data is None or args.text is None:
        parser.error("--data and --text: give the folder with CIFAR-10 and a text file")
    if args.steps < EVALUATED:
        parser.error(f"--steps must be at least {EVALUATED}, got {args.steps}")
    record = provenance.provenance("groups") | {"settings": {"steps": args.steps, "rounds": args.rounds}}
    run = functools.partial(machine.run_child, "bench.groups", sys.executable, malloc="default")
    jobs = [("CNN", args.data), ("text", args.text)]
    record["rows"] = [
        run({"model": model, "path": str(path.absolute()), "steps": args.steps, "rounds": args.rounds})
        for model, path in jobs
    ]
    text = table(record)
    print(text)
    provenance.save(provenance.RESULTS, "groups", record, text)


if __name__ == "__main__":
    main()
