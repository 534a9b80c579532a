"""Table and plot of bench/network.py."""

import itertools
from pathlib import Path

import _network_jax
import _network_torch

FREE = 10_000  # Mbit/s, where the plot puts links without a limit


def of_case(row: dict) -> tuple:
    return row["parameters"], row["hosts"], row["malloc"]


def of_model(row: dict) -> tuple:
    return row["parameters"], row["hosts"]


def grouped(rows, key):
    """Groups of rows in the order of their first."""
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
    """Rate at which the method's own bytes moved, computation included, over the link's; None without a limit."""
    if row["link_mbit"] is None:
        return None
    return row["wire_bytes"] * 8 / (row["ms"] / 1e3 * row["link_mbit"] * 1e6)


def table(record: dict) -> str:
    machine, versions = record["machine"], ", ".join(f"{k} {v}" for k, v in record["versions"].items())
    lines = [
        f"{machine['cpu']} ({machine['architecture']}), {machine['cores']} cores shared by all hosts, "
        f"{machine['memory_gb']} GB, load {machine['load_at_start']} at the start.",
        f"{versions}; commit {record['commit'][:12]}, sources {record['source']}; `{record['command']}`.",
        "",
        "Milliseconds per step, medians (minima). x: times as fast as psum float32 on the same link. %: of the "
        "link's rate, at which the method's own bytes moved, computation included. DDP rows contain forward and "
        "backward pass; what they take beyond that is in brackets [ ].",
    ]
    if not any(row["side"] == "torch" for row in record["rows"]):
        lines.append("PyTorch was not measured.")
    for rows in grouped(record["rows"], of_case).values():
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
        "Counted at the host's interface; a packet there is what the kernel hands over, up to 64 kB, so headers weigh "
        "little. Without headers: 66 bytes a packet less, acknowledgements too. Reported: by `gcjax.info`, "
        "for psum and DDP the formula of ring all-reduces. Ratios: to what was reported, lowest and highest of all "
        "links and malloc settings.",
    ]
    for rows in grouped(record["rows"], of_model).values():
        lines += ["", f"### {size_name(rows[0])}, {rows[0]['hosts']} hosts", "", *byte_counts(rows)]
    return "\n".join(lines)


def times(rows: list[dict]) -> list[str]:
    """Rows down, links across."""
    links = list(grouped(rows, lambda row: row["link_mbit"]))
    by_place = {(row["row"], row["link_mbit"]): row for row in rows}
    lines = ["| | " + " | ".join(map(link_name, links)) + " |", "|---" * (len(links) + 1) + "|"]
    for name in grouped(rows, lambda row: row["row"]):
        cells = []
        for link in links:
            row, dense = by_place[name, link], by_place.get((_network_jax.PLAIN, link))
            without = by_place.get((_network_torch.WITHOUT, link))
            cell = f"{row['ms']:.4g} ({row['ms_min']:.4g})"
            if row["side"] == "torch" and name != _network_torch.WITHOUT:
                cell += f" [{row['ms'] - without['ms']:.4g}]"
            if dense and name != _network_jax.PLAIN:
                cell += f" {dense['ms'] / row['ms']:.2g}x"
            if link and row["wire_bytes"]:
                cell += f" {100 * efficiency(row):.0f} %"
            cells.append(cell)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def ratios(rows: list[dict], counted: str) -> list[float]:
    return [row[counted] / row["wire_bytes"] for row in rows]


def byte_counts(rows: list[dict]) -> list[str]:
    lines = [
        "| | counted | without headers | reported | counted / reported | without headers / reported |",
        "|---" * 6 + "|",
    ]
    for name, same in grouped(rows, lambda row: row["row"]).items():
        if not same[0]["wire_bytes"]:
            continue
        spans = [ratios(same, counted) for counted in ("bytes_counted", "bytes_without_headers")]
        first = [f"{same[0][k]:,.0f}" for k in ("bytes_counted", "bytes_without_headers", "wire_bytes")]
        cells = [name, *first, *(f"{min(span):.3f} to {max(span):.3f}" for span in spans)]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def plot(record: dict, path: Path) -> None:
    """Time per step against link speed, under "keep" if it was measured; a panel for each model and number of hosts."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    settings = {row["malloc"] for row in record["rows"]}
    malloc = "keep" if "keep" in settings else min(settings)
    shown = [row for row in record["rows"] if row["malloc"] == malloc and row["row"] != _network_torch.WITHOUT]
    panels = list(grouped(shown, of_model).values())
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
