"""Compile seconds, estimated cycles, temporaries and collectives of training steps on eight TPUs v5e and eight H100s.

Nothing runs: the compilers' own programs are read. Cycles are the TPU compiler's estimate, the same on every run; of
conditionals the cheapest branch counts, and in a column of its own the most costly one. The GPU compiler gives none.
Every row is saved as soon as it is measured; the same command continues where it stopped.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path

from bench import machine, provenance
from bench.accelerators import environments
from bench.accelerators.child import METHODS, PASS, PLAIN
from bench.accelerators.models import MODELS

ROWS = (PASS, *METHODS)
QUICK = (PASS, PLAIN, "dense", "variance, one capacity")
LONG = 60  # seconds: what takes longer is compiled once
COLUMNS = {  # of the table: header -> key of a row
    "compile s": "compile_s",
    "of a core": "compile_cpu_s",
    "/ plain": "compile_ratio",
    "temporaries MB": "temporaries_mb",
    "/ plain ": "temporaries_ratio",
    "cycles": "cycles",
    "/ plain  ": "cycles_ratio",
    "added / pass": "passes",
    "cycles, costly branches": "cycles_most",
    "collectives": "collectives",
    "their MB": "collective_mb",
    "large all-reduces": "large_all_reduces",
    "sorts": "sorts",
    "scatters": "scatters",
    "conditionals": "conditionals",
    "loops": "loops",
    "of unknown length": "unknown_loops",
    "large loops": "large_loops",
}
KEY = ("target", "model", "method")


def main() -> None:
    args = options()
    path = provenance.RESULTS / "accelerators.json"
    record = provenance.provenance(path.stem, ("jax", "jaxlib", "optax")) | {"skipped": [], "runs": []}
    if not args.quick:
        record["runs"] = measured_before(path, record)
    have = {key_of(run) for run in record["runs"] if is_current(run, record)}
    for target in args.targets:
        try:
            environments.interpreter(target)
        except environments.Unavailable as error:
            record["skipped"].append(str(error))
            continue
        for model in args.models:
            for method in args.methods:
                if (target, model, method) not in have:
                    new = measure(target, model, method, args.repeats, record["source"])
                    record["runs"] = [run for run in record["runs"] if key_of(run) != key_of(new)] + [new]
                    if not args.quick:
                        provenance.save(path.parent, path.stem, record, table(record))
    print(table(record))


def options():
    parser = machine.Parser(prog="python -m bench.accelerators", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the smallest model, four rows; writes no files")
    parser.add_argument("--targets", nargs="+", choices=("tpu", "gpu"), default=["tpu", "gpu"])
    parser.add_argument("--models", nargs="+", choices=MODELS, metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--methods", nargs="+", choices=ROWS, metavar="METHOD", help=f"of {'; '.join(ROWS)}")
    parser.add_argument(
        "--repeats", type=int, default=3, help=f"compilations of each row (default 3); beyond {LONG} s there is one"
    )
    args = parser.parse_args()
    if args.repeats < 1:
        parser.error(f"--repeats must be at least 1, got {args.repeats}")
    args.models = args.models or list(MODELS)[: 1 if args.quick else None]
    args.methods = args.methods or (QUICK if args.quick else ROWS)
    return args


def measured_before(path: Path, record: dict) -> list[dict]:
    """The rows of a result file. Each says on which machine and with which versions, if the new record has others."""
    if not path.is_file():
        return []
    old = json.loads(path.read_text())
    return [provenance.elsewhere(old, record) | run for run in old["runs"]]


def is_current(run: dict, record: dict) -> bool:
    """Whether a row need not be measured again: it is of these sources and made here, and no failure."""
    return not provenance.elsewhere(run, record) and run["source"] == record["source"] and "error" not in run


def key_of(run: dict) -> tuple[str, ...]:
    return tuple(run[name] for name in KEY)


def measure(target: str, model: str, method: str, repeats: int, source: str) -> dict:
    """One row: what the compiler says, and medians of the compile seconds of some fresh processes.

    Raises:
      SystemExit: the sources are no longer those with the digest `source`, of which the other rows were measured.
    """
    row = dict(zip(KEY, (target, model, method), strict=True))
    command = [str(environments.interpreter(target)), "-m", "bench.accelerators.child", json.dumps(row)]
    times: list[tuple[float, float]] = []
    found: dict = {}
    while len(times) < repeats and (not times or times[0][0] < LONG):
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=machine.ROOT, env=environments.variables(target)
        )
        if done.returncode:
            found = {"error": done.stderr.strip().splitlines()[-1][:200]}
            break
        found = json.loads(done.stdout.splitlines()[-1])
        times.append((found["compile_s"], found["compile_cpu_s"]))
        found["compile_s"], found["compile_cpu_s"] = map(statistics.median, zip(*times, strict=True))
        found["compilations"] = len(times)
        found["collective_mb"] = round(found.pop("collective_bytes") / 1e6, 1)
    origin = provenance.origin("accelerators")
    if origin["source"] != source:
        raise SystemExit("accelerators: the sources have changed since the first row; run the command again")
    print(f"{target} {model:<9} {method:<22} {found.get('compile_s', found.get('error'))}", file=sys.stderr)
    return row | found | origin | {"load": machine.load()}


def ratios(runs: list[dict]) -> list[dict]:
    """The rows with what compares them: with plain data parallelism, and the cycles added with those of the pass."""
    by_key = {key_of(run): run for run in runs}
    more = []
    for run in runs:
        plain, alone = (by_key.get((run["target"], run["model"], method), {}) for method in (PLAIN, PASS))
        new = {}
        for name, key in (("compile_ratio", "compile_cpu_s"), ("temporaries_ratio", "temporaries_mb")):
            if run["method"] != PASS and key in run and plain.get(key):
                new[name] = round(run[key] / plain[key], 2)
        if run["method"] != PASS and "cycles" in run and "cycles" in plain:
            new["cycles_ratio"] = round(run["cycles"] / plain["cycles"], 2)
            if "cycles" in alone:
                new["passes"] = round((run["cycles"] - plain["cycles"]) / alone["cycles"], 2)
        more.append(run | new)
    return more


def table(record: dict) -> str:
    """Markdown."""
    lines = [
        provenance.machine_line(record),
        provenance.versions_line(record),
        *record["skipped"],
        "",
        f"| target | model | method | {' | '.join(map(str.strip, COLUMNS))} |",
        "|" + "---|" * (3 + len(COLUMNS)),
    ]
    for run in ratios(record["runs"]):
        cells = [cell(run, key) for key in COLUMNS.values()]
        if "error" in run:
            cells[0] = f"fails: {run['error']}"
        lines.append(f"| {run['target']} | {run['model']} | {run['method']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def cell(run: dict, key: str) -> str:
    if key not in run:
        return "-"
    # A loop of unknown length counts once.
    at_least = "at least " if run.get("unknown_loops") and key in ("cycles", "cycles_most") else ""
    return f"{at_least}{run[key]:,}"


if __name__ == "__main__":
    main()
