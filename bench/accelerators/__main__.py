"""Compile seconds, estimated cycles, temporaries and collectives of training steps on eight TPUs v5e and eight H100s.

Nothing runs: the compilers' own programs are read. Cycles are the TPU compiler's estimate, the same on every run; of
conditionals the cheapest branch counts, and in a column of its own the most costly one. The GPU compiler gives none.
"""

import json
import statistics
import subprocess
import sys

from bench import machine, provenance
from bench.accelerators import environments
from bench.accelerators.child import METHODS

MODELS = {"4M in 4": (4, 1024), "4M in 24": (24, 418), "25M in 4": (4, 2500), "25M in 24": (24, 1024)}
QUICK = ("plain pmean", "dense", "variance, one capacity")
COLUMNS = {  # of the table: header -> key of a row
    "compile s": "compile_s",
    "temporaries MB": "temporaries_mb",
    "cycles": "cycles",
    "cycles, costly branches": "cycles_most",
    "collectives": "collectives",
    "their MB": "collective_mb",
    "large all-reduces": "large_all_reduces",
    "sorts": "sorts",
    "scatters": "scatters",
    "conditionals": "conditionals",
    "loops": "loops",
    "large loops": "large_loops",
}


def main() -> None:
    args = options()
    record = provenance.provenance("accelerators", ("jax", "jaxlib", "optax")) | {"skipped": [], "rows": []}
    models = list(MODELS)[:1] if args.quick else list(MODELS)
    for target in args.targets:
        try:
            environments.interpreter(target)
        except environments.Unavailable as error:
            record["skipped"].append(str(error))
            continue
        for model in models:
            for method in QUICK if args.quick else args.methods:
                row = {"target": target, "model": model, "method": method} | measure(
                    target, model, method, args.repeats
                )
                record["rows"].append(row)
                print(f"{target} {model:<9} {method:<22} {row.get('compile_s', row.get('error'))}", file=sys.stderr)
                if not args.quick:
                    provenance.save(provenance.RESULTS, "accelerators", record, table(record))
    print(table(record))


def options():
    parser = machine.Parser(prog="python -m bench.accelerators", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest model, three methods; writes no files")
    parser.add_argument("--targets", nargs="+", choices=("tpu", "gpu"), default=["tpu", "gpu"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="METHOD")
    parser.add_argument("--repeats", type=int, default=3, help="compilations of each row (default 3)")
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    return args


def measure(target: str, model: str, method: str, repeats: int) -> dict:
    """One row: what the compiler says, and the median of the compile seconds of some fresh processes."""
    layers, width = MODELS[model]
    job = json.dumps({"target": target, "layers": layers, "width": width, "method": method})
    command = [str(environments.interpreter(target)), "-m", "bench.accelerators.child", job]
    seconds = []
    for _ in range(repeats):
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=machine.ROOT, env=environments.variables(target)
        )
        if done.returncode:
            return {"error": done.stderr.strip().splitlines()[-1][:200]}
        row = json.loads(done.stdout.splitlines()[-1])
        seconds.append(row["compile_s"])
    row["collective_mb"] = round(row.pop("collective_bytes") / 1e6, 1)
    return row | {"compile_s": statistics.median(seconds)}


def table(record: dict) -> str:
    """Markdown."""
    lines = [
        provenance.machine_line(record),
        provenance.versions_line(record),
        *record["skipped"],
        "",
        f"| target | model | method | {' | '.join(COLUMNS)} |",
        "|" + "---|" * (3 + len(COLUMNS)),
    ]
    for row in record["rows"]:
        cells = [f"{row[key]:,}" if key in row else "-" for key in COLUMNS.values()]
        if "error" in row:
            cells[0] = f"fails: {row['error']}"
        lines.append(f"| {row['target']} | {row['model']} | {row['method']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
