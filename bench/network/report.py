"""Table and plot of the network benchmark."""

import itertools
from collections.abc import Callable, Iterable
from pathlib import Path

from bench import provenance
from bench.network import jax_workers, torch_workers

WITHOUT = {"jax": jax_workers.WITHOUT, "torch": torch_workers.WITHOUT}
FREE = 10_000  # Mbit/s: the plot's place for links without a limit


def case_of(row: dict) -> tuple:
    return row["parameters"], row["hosts"], row["malloc"]


def model_of(row: dict) -> tuple:
    return row["parameters"], row["hosts"]


def grouped(rows: Iterable[dict], key: Callable[[dict], object]) -> dict:
    """Key -> its rows. Keys are in the order of their first rows."""
    found: dict = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def size_name(row: dict) -> str:
    millions = f"{row['parameters'] / 1e6:.3g}M"
    return f"{millions} (transformer, whole training step)" if row["model"] == "transformer" else millions


def link_name(link: int | None) -> str:
    return "no limit" if link is None else f"{link} Mbit/s"


def efficiency(row: dict) -> float | None:
    """The method's own bytes per second of the step, as a share of the link's rate. None without a limit."""
    if row["link_mbit"] is None:
        return None
    return row["wire_bytes"] * 8 / (row["ms"] / 1e3 * row["link_mbit"] * 1e6)


def table(record: dict) -> str:
    """Markdown: a table of times for each model, number of hosts and malloc setting, then tables of bytes."""
    machine = record["machine"]
    lines = [
        f"{machine['cpu']} ({machine['architecture']}), {machine['cores']} cores shared by all hosts, "
        f"{machine['memory_gb']} GB, load {machine['load_at_start']} at the start.",
        provenance.versions_line(record),
    ]
    if later := record.get("later"):
        lines.append(f"{later['rows']}: measured later, at commit {later['commit'][:12]} ({later['why']}).")
    lines += [
        "",
        "Milliseconds per step, medians (minima). x: speed relative to psum float32 on the same link. %: the method's "
        "own bytes per second of the step, computation included, relative to the link's rate. DDP rows and those of "
        "the transformer contain forward and backward pass; the time beyond the row without exchange is in brackets.",
    ]
    if not any(row["side"] == "torch" for row in record["rows"]):
        lines.append("PyTorch was not measured.")
    for rows in grouped(record["rows"], case_of).values():
        lines += [
            "",
            f"## {size_name(rows[0])}, {rows[0]['hosts']} hosts, malloc {rows[0]['malloc']}",
            "",
            *times(rows),
        ]
    lines += [
        "",
        "## Bytes of one step and host",
        "",
        "Counted: at the host's interface. A packet there is what the kernel hands over, up to 64 kB, so headers "
        "weigh little. Without headers: less 66 bytes for each packet, acknowledgements included. Reported: by "
        "`gcjax.info`; for psum and DDP by the formula of ring all-reduces. Ratios to the reported bytes: lowest and "
        "highest over all links and malloc settings.",
    ]
    for rows in grouped(record["rows"], model_of).values():
        lines += ["", f"### {size_name(rows[0])}, {rows[0]['hosts']} hosts", "", *byte_counts(rows)]
    return "\n".join(lines)


def times(rows: list[dict]) -> list[str]:
    """A table of one case: a line for each row, a column for each link."""
    links = list(grouped(rows, lambda row: row["link_mbit"]))
    by_place = {(row["row"], row["link_mbit"]): row for row in rows}
    lines = ["| | " + " | ".join(map(link_name, links)) + " |", "|---" * (len(links) + 1) + "|"]
    for name in grouped(rows, lambda row: row["row"]):
        cells = []
        for link in links:
            row, dense = by_place[name, link], by_place.get((jax_workers.PLAIN, link))
            without = by_place.get((WITHOUT[row["side"]], link))
            cell = f"{row['ms']:.4g} ({row['ms_min']:.4g})"
            if without and name != without["row"]:
                cell += f" [{row['ms'] - without['ms']:.4g}]"
            if dense and name != jax_workers.PLAIN:
                cell += f" {dense['ms'] / row['ms']:.2g}x"
            if link and row["wire_bytes"]:
                cell += f" {100 * efficiency(row):.0f} %"
            cells.append(cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def byte_counts(rows: list[dict]) -> list[str]:
    """A table of one model: bytes counted and reported, and their ratios."""
    lines = [
        "| | counted | without headers | reported | counted / reported | without headers / reported |",
        "|---" * 6 + "|",
    ]
    for name, same in grouped(rows, lambda row: row["row"]).items():
        if not same[0]["wire_bytes"]:
            continue
        counts = ("bytes_counted", "bytes_without_headers")
        spans = [[row[counted] / row["wire_bytes"] for row in same] for counted in counts]
        first = [f"{same[0][k]:,.0f}" for k in (*counts, "wire_bytes")]
        cells = [name, *first, *(f"{min(span):.3f} to {max(span):.3f}" for span in spans)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def plot(record: dict, path: Path) -> None:
    """Time per step against link rate, a panel for each model and number of hosts; with "keep" if it was measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = {row["malloc"] for row in record["rows"]}
    malloc = "keep" if "keep" in settings else min(settings)
    shown = [row for row in record["rows"] if row["malloc"] == malloc and row["row"] not in WITHOUT.values()]
    panels = list(grouped(shown, model_of).values())
    across = min(2, len(panels))
    figure, axes = plt.subplots(
        -(-len(panels) // across), across, figsize=(6.5 * across, 4.5 * -(-len(panels) // across)), squeeze=False
    )
    names = list(grouped(shown, lambda row: row["row"]))
    colours = dict(zip(names, itertools.cycle(plt.cm.tab20.colors), strict=False))
    for axis, rows in itertools.zip_longest(axes.flat, panels):
        if rows is None:
            axis.axis("off")
            continue
        for name, same in grouped(rows, lambda row: row["row"]).items():
            same = sorted(same, key=lambda row: row["link_mbit"] or FREE)
            style = "--s" if same[0]["side"] == "torch" else "-o"
            x = [row["link_mbit"] or FREE for row in same]
            axis.loglog(x, [row["ms"] for row in same], style, ms=3, lw=1.2, color=colours[name], label=name)
        ticks = sorted({row["link_mbit"] or FREE for row in rows})
        axis.set_xticks(ticks, ["no limit" if t == FREE else str(t) for t in ticks])
        axis.minorticks_off()
        axis.set(xlabel="link, Mbit/s", ylabel="ms per step", title=f"{size_name(rows[0])}, {rows[0]['hosts']} hosts")
        axis.grid(alpha=0.3)
    lines = {label: line for axis in axes.flat for line, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, fontsize=8)
    figure.set_layout_engine("constrained")
    figure.suptitle(f"Time per step, malloc {malloc}; dashed: PyTorch DDP with forward and backward pass", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)
