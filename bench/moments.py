"""The cost of `value_and_moments` beside plain `jax.value_and_grad`: time, temporary memory, compile time.

    python -m bench.moments [--models MLP CNN --out FOLDER] [--rounds 15] [--torch-python PYTHON]

The functions of a model are timed round-robin. A ratio is the median of the ratios within the rounds, so that other
work on the machine affects both alike. BackPACK and torch.func run in a process of their own; without torch they are
skipped with a message.
"""

import argparse
import functools
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

import gcjax
from bench import machine, provenance
from bench.moments_models import MODELS

TARGETS = {
    "MLP, batch 16": 1.50,
    "MLP, batch 64": 1.50,
    "MLP, batch 256": 1.50,
    "CNN": 1.10,
    "ResNet-20 GroupNorm": 1.10,
    "ResNet-20 BatchNorm": 1.20,
    "VGG16": 1.10,
    "transformer": 1.10,
    "transformer, tied": 1.10,
    "scanned blocks": 1.05,
    "RNN": 1.05,
}
WITH_PLAIN_METHODS = ("MLP, batch 64", "CNN")


def compiled(fn: Callable, *args) -> tuple[Callable, float, float]:
    """The executable, seconds of tracing and compiling, and MiB of temporaries."""
    start = time.perf_counter()
    executable = jax.jit(fn).lower(*args).compile()
    seconds = time.perf_counter() - start
    jax.block_until_ready(executable(*args))
    return executable, seconds, executable.memory_analysis().temp_size_in_bytes / 2**20


def seconds_in_turn(executables: list[Callable], args: tuple, rounds: int) -> np.ndarray:
    """float64[rounds, executables], seconds of each call. The executables are called round-robin."""
    times = np.zeros((rounds, len(executables)))
    for i in range(rounds):
        for j, executable in enumerate(executables):
            start = time.perf_counter()
            jax.block_until_ready(executable(*args))
            times[i, j] = time.perf_counter() - start
    return times


def measure(name: str, rounds: int) -> dict:
    """One row of results for a model."""
    loss, params, batch, sample_axis = MODELS[name]()
    plain_loss = loss
    if "axis" in inspect.signature(loss).parameters:
        plain_loss = functools.partial(loss, axis=None)
    moments = functools.partial(gcjax.value_and_moments, loss, sample_axis=sample_axis)
    functions = {"plain": jax.value_and_grad(plain_loss), "moments": moments()}
    if name in WITH_PLAIN_METHODS:
        functions["vmap"] = moments(method="vmap", max_bytes=4 << 30)
        functions["scan"] = moments(method="scan")
    built = {label: compiled(fn, params, batch) for label, fn in functions.items()}
    times = seconds_in_turn([entry[0] for entry in built.values()], (params, batch), rounds)
    row = {"model": name, "target": TARGETS[name], "parameters": sum(p.size for p in jax.tree.leaves(params))}
    for i, (label, (_, seconds, memory)) in enumerate(built.items()):
        row[label] = {
            "milliseconds": 1e3 * float(np.median(times[:, i])),
            "ratio": float(np.median(times[:, i] / times[:, 0])),
            "ratio_of_fastest": float(times[:, i].min() / times[:, 0].min()),
            "ratio_quartiles": [float(q) for q in np.quantile(times[:, i] / times[:, 0], [0.25, 0.75])],
            "temporary_mib": memory,
            "compile_seconds": seconds,
        }
    return row


def torch_peers(python: str, rounds: int) -> dict:
    """BackPACK and torch.func on the same models, or the reason why they are skipped."""
    command = [python, "-m", "bench.moments_torch", str(rounds)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=machine.ROOT)
    if done.returncode:
        return {"skipped": done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "torch process failed"}
    return json.loads(done.stdout)


def model_line(row: dict) -> str:
    plain, ours = row["plain"], row["moments"]
    low, high = ours["ratio_quartiles"]
    cells = [
        row["model"],
        f"{plain['milliseconds']:.1f}",
        f"{ours['milliseconds']:.1f}",
        f"{ours['ratio']:.2f}",
        f"{low:.2f}-{high:.2f}",
        f"{ours['ratio_of_fastest']:.2f}",
        f"{row['target']:.2f}",
        f"{plain['temporary_mib']:.1f}, {ours['temporary_mib']:.1f}",
        f"{ours['temporary_mib'] / plain['temporary_mib']:.2f}",
        f"{plain['compile_seconds']:.1f}, {ours['compile_seconds']:.1f}",
        f"{ours['compile_seconds'] / plain['compile_seconds']:.2f}",
    ]
    return "| " + " | ".join(cells) + " |"


def table(result: dict) -> str:
    """Markdown."""
    lines = [
        f"{provenance.machine_line(result)} Load average at the start: {result['machine']['load_at_start']:.1f}.",
        provenance.versions_line(result),
        "",
        "| model | plain ms | moments ms | ratio | quartiles | of fastest | target "
        "| temporaries MiB | ratio | compile s | ratio |",
        "|" + "---|" * 11,
    ]
    lines += [model_line(row) for row in result["models"]]
    lines += ["", "| other ways | ms | ratio to its own plain gradient | temporaries MiB |", "|---|---|---|---|"]
    for row in result["models"]:
        for label in ("vmap", "scan"):
            if label in row:
                entry = row[label]
                cells = f"{entry['milliseconds']:.1f} | {entry['ratio']:.1f} | {entry['temporary_mib']:.1f}"
                lines.append(f"| {row['model']}, method={label!r} | {cells} |")
    for row in result["torch"].get("models", []):
        for label in ("plain", "backpack", "torch.func"):
            cells = f"{row[label]['milliseconds']:.1f} | {row[label]['ratio']:.1f} | |"
            lines.append(f"| {row['model']}, torch, {label} | {cells}")
    if "skipped" in result["torch"]:
        lines.append(f"| torch skipped: {result['torch']['skipped']} | | | |")
    return "\n".join(lines)


def main() -> None:
    parser = machine.Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=list(MODELS), help="names, or parts of names")
    parser.add_argument("--rounds", type=int, default=15, help="timed calls (default 15)")
    parser.add_argument("--torch-python", type=machine.interpreter, default=sys.executable, help=machine.TORCH_HELP)
    parser.add_argument("--out", type=Path, default=provenance.RESULTS, help="folder for the results")
    args = parser.parse_args()
    provenance.keep_whole(parser, args, "models")
    record = provenance.provenance("moments") | {"models": []}
    for name in MODELS:
        if any(part in name for part in args.models):
            record["models"].append(measure(name, args.rounds))
            print(f"{name}: {record['models'][-1]['moments']['ratio']:.2f}", flush=True)
    record["torch"] = torch_peers(args.torch_python, args.rounds)
    text = table(record)
    provenance.save(args.out, "moments", record, text)
    print(text)


if __name__ == "__main__":
    main()
