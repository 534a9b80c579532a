"""How the methods scale by the planner's model: 2 to 1,024 workers, three links, flat and with 8 workers per host.

Speed-up is over dense float32 with the same number of workers. Efficiency is the share of the step that is not spent
on compressing and exchanging. The cost of compressing is measured on this device by `gcjax.measure_costs`.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path

import matplotlib
from tqdm import tqdm

import gcjax
from bench import machine, provenance

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PARAMETERS, STEP_TIME = 25_600_000, 0.3
WORKERS = [2**k for k in range(1, 11)]
SHOWN = (2, 8, 64, 1024)  # workers in the table
LINKS = ("1Gbit", "10Gbit", "100Gbit")
INNER = 8
PLACES = {"flat": {}, f"{INNER} per host": {"inner_workers": INNER, "inner_link": "300Gbit"}}
METHODS = ["variance", "variance (two_phase)", "top_k (two_phase)", "random_k", "onebit", "power_sgd rank 2"]


def main() -> None:
    args = options()
    record = provenance.provenance("scaling")
    costs = measured() if args.compute == "measured" else dict.fromkeys(["dense float32", *METHODS], (0.0, 0.0, 0.0))
    settings = {"parameters": PARAMETERS, "step_time": STEP_TIME, "density": 0.01, "compute": args.compute}
    record |= {"settings": settings | {"costs": costs}, "rows": rows(costs)}
    text = table(record)
    print(text)
    provenance.save(args.out, "scaling", record, text)
    plot(record["rows"], args.out / "scaling.png")


def options() -> argparse.Namespace:
    parser = machine.Parser(description=__doc__.splitlines()[0])
    compute = ("measured", "none")
    parser.add_argument("--compute", choices=compute, default="measured", help="none: as if compressing cost nothing")
    parser.add_argument("--out", type=Path, default=provenance.RESULTS, help="folder for the results")
    args = parser.parse_args()
    provenance.keep_whole(parser, args, "compute")
    return args


def measured() -> Mapping[str, tuple[float, float, float]]:
    """The methods' costs on this device, measured now."""
    names = ["dense float32", *METHODS]
    with tqdm(total=len(names), desc="measuring", disable=None) as bar:

        def progress(done, count, name):
            bar.set_postfix_str(name)
            bar.update(done - bar.n)

        return gcjax.measure_costs(progress, names)


def rows(costs: Mapping[str, tuple[float, float, float]]) -> list[dict]:
    """The planner's prediction for every place, number of workers, link and method."""
    found = []
    cases = [(place, workers) for place in PLACES for workers in WORKERS if not (PLACES[place] and workers <= INNER)]
    for place, workers in tqdm(cases, desc="planning", disable=None):
        first = gcjax.plan(
            PARAMETERS, workers, LINKS[0], STEP_TIME, methods=METHODS, costs=costs, latency="50us", **PLACES[place]
        )
        for link in LINKS:
            for row in first.at(link).rows:
                found.append(
                    {"place": place, "workers": workers, "link": link, "method": row.method}
                    | {"wire_mb": round(row.wire_bytes / 1e6, 3), "arriving_gb": round(row.arriving_bytes / 1e9, 3)}
                    | {"step_ms": round(1e3 * row.step, 3), "speedup": round(row.speedup, 3)}
                    | {"efficiency": round(STEP_TIME / row.step, 4)}
                )
    return found


def table(record: dict) -> str:
    """Markdown, a table for each link and place."""
    lines = [
        f"Predicted by `gcjax.plan`, not measured: {PARAMETERS:,} parameters, {1e3 * STEP_TIME:.0f} ms a step without "
        "exchange, 50 us a message, density 1/100. Speed-up over dense float32 (scaling efficiency in %).",
        f"Cost of compressing: {record['settings']['compute']}, {record['machine']['cpu']}, "
        f"{record['machine']['cores']} cores; sources {record['source']}; `{record['command']}`.",
        "*: every worker gathers more than 10 GB.",
    ]
    by_case = {(row["place"], row["link"], row["method"], row["workers"]): row for row in record["rows"]}
    for place in PLACES:
        for link in LINKS:
            workers = [w for w in SHOWN if (place, link, "dense float32", w) in by_case]
            lines += ["", f"{link}, {place}:", "", f"| method | {' | '.join(f'{w:,}' for w in workers)} |"]
            lines.append("|---" * (1 + len(workers)) + "|")
            methods = dict.fromkeys(method for p, at, method, _ in by_case if (p, at) == (place, link))
            for method in sorted(methods):
                cells = [by_case[place, link, method, w] for w in workers]
                lines.append(f"| {method} | {' | '.join(map(cell, cells))} |")
    return "\n".join(lines)


def cell(row: dict) -> str:
    return f"{row['speedup']:.2f} ({100 * row['efficiency']:.0f}){'*' if row['arriving_gb'] > 10 else ''}"


def plot(rows: list[dict], path: Path) -> None:
    """Efficiency against workers. A line stops where a worker would gather more than 10 GB."""
    figure, axes = plt.subplots(
        len(PLACES), len(LINKS), figsize=(13, 7), sharex=True, sharey=True, layout="constrained"
    )
    methods = sorted({row["method"] for row in rows})
    for across, place in zip(axes, PLACES, strict=True):
        for ax, link in zip(across, LINKS, strict=True):
            for method in methods:
                same = [r for r in rows if (r["place"], r["link"], r["method"]) == (place, link, method)]
                same = [r for r in same if r["arriving_gb"] <= 10]
                style = {"color": "black", "linewidth": 2} if method == "dense float32" else {}
                ax.plot([r["workers"] for r in same], [100 * r["efficiency"] for r in same], label=method, **style)
            ax.set_title(f"{link}, {place}")
            ax.set_xscale("log", base=2)
            ax.grid(alpha=0.3)
    for ax in axes[-1]:
        ax.set_xlabel("workers")
    for ax in axes[:, 0]:
        ax.set_ylabel("scaling efficiency, %")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
