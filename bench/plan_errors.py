"""How well the planner's model predicts the times that bench.network measured: measured, predicted, error.

The computing part of a step is its time alone, on all hosts at once, plus the cost of decoding the other hosts'
payloads by the table of `gcjax.measure_costs`. The network is the planner's, with the latency of a scalar maximum and
the link's rate. Two things come from the collectives measured in the same run: the rate of unlimited links, and how far
gloo's collectives of more than a megabyte, which do not always send and receive at once, fall behind the model.
"""

import argparse
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from tqdm import tqdm

import gcjax
from bench import machine, provenance
from bench.network import jax_workers
from gcjax._comm.link import EFFICIENCY
from gcjax._comm.simulated import Transfer, arriving_bytes, model_of, transfers_of
from gcjax._planner.costs import costs_of
from gcjax._planner.measuring import DENSITY, standard_methods

GOOD = 0.15
BUFFERED = 2**20  # bytes: below this, the sockets' buffers take what is sent meanwhile
FREE = 10e9  # bits per second, a first guess where there is no limit
COST_OF = {"variance": "variance", "top-k": "top_k", "dense float16": "dense float16"}  # rows that decode every payload


def main() -> None:
    args = options()
    record = json.loads(args.file.read_text())
    if args.decode_ns:
        costs = dict.fromkeys(COST_OF.values(), gcjax.Cost(0, 0, args.decode_ns * 1e-9))
    else:
        standard = standard_methods(DENSITY)
        costs = costs_of(
            {name: standard[name] for name in COST_OF.values()},
            lambda done, count, name: print(f"measuring {name}, {done + 1} of {count}"),
        )
    rows = [
        predicted(row, record, costs)
        for row in tqdm(record["rows"], desc="rows", disable=None)
        if row["side"] == "jax" and find(record["alone"], row, "hosts", "parameters", "malloc", "row")
    ]
    text = table(rows, record, args.file.name)
    print(provenance.with_note(text, provenance.outdated(record, "network")))
    if args.out:
        measured = {"result": "network", "commit": record["commit"], "source": record["source"]}
        found = provenance.provenance("plan_errors") | {"of": args.file.name, "measured": measured, "rows": rows}
        provenance.save(args.out, "plan_errors", found, text)


def options() -> argparse.Namespace:
    parser = machine.Parser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "file", type=Path, nargs="?", default=provenance.RESULTS / "network.json", help="of bench.network"
    )
    parser.add_argument("--out", type=Path, help="folder for plan_errors.md and plan_errors.json")
    parser.add_argument("--decode-ns", type=float, help="nanoseconds of decoding a byte, instead of measured costs")
    args = parser.parse_args()
    for path in (args.file, args.out):
        if path and not path.exists():
            parser.error(f"there is no {path}; run bench.network first")
    return args


def find(rows: Iterable[dict], like: dict, *keys: str) -> dict | None:
    """The first row that agrees with `like` in the keys."""
    return next((row for row in rows if all(row[key] == like[key] for key in keys)), None)


def predicted(row: dict, record: dict, costs: Mapping[str, gcjax.Cost]) -> dict:
    """A row of the network's record with its predicted times and the error."""
    hosts, parameters = row["hosts"], row["parameters"]
    kind, make = jax_workers.ROWS[row["row"]]
    # The step's own capacity instead of the ladder, of which the planner would take the largest.
    tx = gcjax.variance_compress(capacity=row["capacity"]) if "adaptive" in row["row"] else make(gcjax, parameters, {})
    squares = jax_workers.GRADIENTS[kind] is not None
    alone, together = (transfers_of(tx, model_of(parameters), workers, squares) for workers in (1, hosts))
    if row["row"] == jax_workers.PLAIN:  # no transform of gcjax, but a mean of every leaf: XLA joins them
        together = (Transfer("all_reduce", 4 * parameters),)
    more = sum(arriving_bytes(m, hosts) for m in together) - sum(arriving_bytes(m, 1) for m in alone)
    per_byte = next((costs[cost].per_byte for name, cost in COST_OF.items() if row["row"].startswith(name)), 0.0)
    # Decoding uses one thread: hosts take turns if there are more than cores.
    decode = max(more, 0) * per_byte * max(1.0, hosts / record["machine"]["cores"])
    compute = find(record["alone"], row, "hosts", "parameters", "malloc", "row")["ms"] / 1e3 + decode
    wire = sum(link(message, row, record).seconds(message, hosts) for message in together)
    ms = 1e3 * (compute + wire)
    keys = ("hosts", "parameters", "link_mbit", "malloc", "row", "ms")
    return {key: row[key] for key in keys} | {
        "compute_ms": round(1e3 * compute, 2),
        "wire_ms": round(1e3 * wire, 2),
        "predicted_ms": round(ms, 2),
        "error": round(ms / row["ms"] - 1, 3),
    }


def link(message: Transfer, row: dict, record: dict) -> gcjax.Link:
    """The link of a row as seen by one message."""
    same = [c for c in record["collectives"] if all(c[key] == row[key] for key in ("hosts", "link_mbit", "malloc"))]
    scalar = next(c for c in same if c["kind"] == "scalar_max")
    latency = scalar["ms"] / 1e3 / max((row["hosts"] - 1).bit_length(), 1)
    limited = row["link_mbit"] is not None
    of_model = gcjax.Link(1e6 * row["link_mbit"] if limited else FREE, latency, EFFICIENCY)
    kind = "all_reduce" if message.kind == "maximum" else message.kind
    if limited and message.bytes < BUFFERED:
        return of_model
    largest = max((c for c in same if c["kind"] == kind), key=lambda c: c["bytes"])
    # Subtracting two latencies is exact enough: the largest message takes far longer.
    bare = of_model._replace(latency=0.0).seconds(Transfer(kind, largest["bytes"]), row["hosts"])
    return of_model._replace(efficiency=EFFICIENCY * bare / max(largest["ms"] / 1e3 - 2 * latency, 1e-9))


def table(rows: list[dict], record: dict, name: str) -> str:
    """Markdown."""
    found = record["machine"]
    good = [row for row in rows if abs(row["error"]) <= GOOD]
    lines = [
        f"Measured: {name}, {found['cpu']}, {found['cores']} cores shared by all hosts; commit "
        f"{record['commit'][:12]}. Milliseconds, medians.",
        f"{len(good)} of {len(rows)} predictions are within {100 * GOOD:.0f} % of the measurement.",
        "",
        "| hosts | parameters | link Mbit | malloc | row | measured | predicted | compute | wire | error % | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        link = row["link_mbit"] or "unlimited"
        times = " | ".join(f"{row[key]:.1f}" for key in ("ms", "predicted_ms", "compute_ms", "wire_ms"))
        miss = "" if abs(row["error"]) <= GOOD else "off"
        lines.append(
            f"| {row['hosts']} | {row['parameters'] / 1e6:g}M | {link} | {row['malloc']} | {row['row']} | {times} "
            f"| {100 * row['error']:+.0f} | {miss} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
