"""Gossip algorithms, simulated: accuracy of the mean model against bits sent and time, with 16, 64 and 256 nodes.

A network of 9,610 parameters learns scikit-learn's digits; every node has its own part of the images. All algorithms
make the same number of gradient steps with the same optimiser, schedule and learning rate. One node in 16 is slower.
"""

import argparse
import math
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import gcjax
from bench import machine, provenance
from gcjax import gossip
from gcjax._types import Array, PyTree

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STEPS = {16: 600, 64: 400, 256: 600}  # gradient steps per node
SEEDS = {16: 3, 64: 2, 256: 1}  # the whole takes ten minutes of CPU
BATCH = 8
LINK = gcjax.Link(1e8, 100e-6)
STEP_SECONDS, SLOW, ONE_IN = 5e-3, 2.0, 16
MOMENTS = 40
CASES = {
    "all-reduce, large batch": {"algorithm": "allreduce"},
    "local SGD, 4 steps": {"algorithm": "local_sgd", "local_steps": 4},
    "D-PSGD, ring": {"algorithm": "d_psgd"},
    "SGP": {"algorithm": "sgp"},
    "AD-PSGD": {"algorithm": "swarm"},
    "SwarmSGD, 2 steps": {"algorithm": "swarm", "local_steps": 2},
    "SwarmSGD, 2 steps, 8 bits": {"algorithm": "swarm", "local_steps": 2, "bits": 8},
    "SwarmSGD, 2 steps, 8 bits, blocking": {"algorithm": "swarm", "local_steps": 2, "bits": 8, "blocking": True},
}
DENSE, SWARM, NEIGHBOURS = "all-reduce, large batch", "SwarmSGD, 2 steps, 8 bits", "D-PSGD, ring"


def main() -> None:
    args = options()
    packages = ("jax", "jaxlib", "optax", "numpy", "scikit-learn")
    record = provenance.provenance("gossip", packages)
    begin, cpu = time.perf_counter(), time.process_time()
    cases = [
        (nodes, name, seed) for nodes in args.nodes for name in CASES for seed in range(min(args.seeds, SEEDS[nodes]))
    ]
    runs = []
    with tqdm(total=sum(STEPS[nodes] for nodes, _, _ in cases), unit="step", disable=None) as bar:
        for nodes, name, seed in cases:
            bar.set_postfix_str(f"{nodes} nodes, {name}, seed {seed}")
            runs.append(simulated(nodes, name, seed, args.learning_rate, bar))
    settings = {"steps": STEPS, "batch": BATCH, "learning_rate": args.learning_rate}
    settings |= {"link": LINK._asdict(), "step_seconds": STEP_SECONDS, "slow_factor": SLOW, "slow_one_in": ONE_IN}
    took = {"seconds": round(time.perf_counter() - begin), "cpu_seconds": round(time.process_time() - cpu)}
    record |= took | {"settings": settings}
    record |= {"speed": [speed(*case) for case in (("full", None), ("8 bits", 8))] if args.speed else []}
    record |= {"runs": runs}
    text = report(record)
    print(text)
    provenance.save(args.out, "gossip", record, text, indent=None)
    plot(runs, args.nodes, args.out / "gossip.png")


def options() -> argparse.Namespace:
    parser = machine.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", choices=list(STEPS), default=list(STEPS))
    parser.add_argument("--seeds", type=int, default=3, help=f"at most this many of {SEEDS}; the results are medians")
    parser.add_argument("--learning-rate", type=float, default=0.2, help="at the start; falls to 0 as a cosine")
    parser.add_argument("--no-speed", dest="speed", action="store_false", help="do not measure events per second")
    parser.add_argument("--out", type=Path, default=provenance.RESULTS, help="folder for the results")
    args = parser.parse_args()
    provenance.keep_whole(parser, args, "nodes", "seeds", "learning_rate", "speed")
    return args


def init_params(key: Array) -> PyTree:
    first, second = jax.random.split(key)
    return {
        "hidden": {"w": jax.random.normal(first, (64, 128)) * math.sqrt(2 / 64), "b": jnp.zeros(128)},
        "out": {"w": jax.random.normal(second, (128, 10)) * math.sqrt(1 / 128), "b": jnp.zeros(10)},
    }


def logits(params: PyTree, images: Array) -> Array:
    hidden = jax.nn.relu(images @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def loss_fn(params: PyTree, batch: tuple[Array, Array]) -> Array:
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


def load(nodes: int) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Images and labels of the nodes, the same number for each, and those to test with."""
    images, labels = load_digits(return_X_y=True)
    images, labels = (images / 16).astype(np.float32), labels.astype(np.int32)
    train, test, train_labels, test_labels = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    each = len(train) // nodes
    own = [x[: each * nodes].reshape(nodes, each, *x.shape[1:]) for x in (train, train_labels)]
    return (own[0], own[1]), (test, test_labels)


def simulated(nodes: int, name: str, seed: int, learning_rate: float, bar: tqdm) -> dict:
    """The curves of one algorithm and one seed."""
    data, test = load(nodes)
    steps = STEPS[nodes]

    def evaluate(params):
        right = jnp.argmax(logits(params, test[0]), axis=-1) == test[1]
        everything = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data)
        return {"accuracy": 100 * jnp.mean(right), "loss": loss_fn(params, everything)}

    slow = tuple(STEP_SECONDS * (SLOW if node % ONE_IN == 0 else 1) for node in range(nodes))
    begin, at = time.perf_counter(), bar.n
    curves = gossip.simulate(
        loss_fn,
        init_params(jax.random.key(seed)),
        data,
        optax.sgd(optax.cosine_decay_schedule(learning_rate, steps), momentum=0.9),
        nodes=nodes,
        steps=steps,
        batch_size=BATCH,
        evaluate=evaluate,
        key=jax.random.key(100 + seed),
        link=LINK,
        step_seconds=slow,
        moments=MOMENTS,
        progress=lambda done, units: bar.update(at + steps * done // units - bar.n),
        **CASES[name],
    )
    found = {"nodes": nodes, "name": name, "seed": seed, "wall_seconds": round(time.perf_counter() - begin, 1)}
    found |= {k: getattr(curves, k).tolist() for k in ("events", "gradients", "seconds", "bits", "resent")}
    found["spread"] = curves.consensus_distance.tolist()
    return found | {k: np.round(v.astype(float), 5).tolist() for k, v in curves.metrics.items()}


def speed(name: str, bits: int | None, nodes: int = 256) -> dict:
    """Events per second of non-blocking SwarmSGD, and the CPU time of one, which other load hardly changes.

    Medians over stretches after compilation, and the best stretch.
    """
    data, _ = load(nodes)
    marks: list = []
    gossip.simulate(
        loss_fn,
        init_params(jax.random.key(0)),
        data,
        optax.sgd(0.1, momentum=0.9),
        nodes=nodes,
        steps=80,
        batch_size=BATCH,
        local_steps=2,
        bits=bits,
        evaluate=lambda params: 0.0,
        key=jax.random.key(0),
        moments=10,
        progress=lambda done, units: marks.append((done, time.perf_counter(), time.process_time())),
    )
    events, seconds, cpu = np.diff(np.array(marks[1:]), axis=0).T  # the first stretch begins before the compilation
    found = {"name": name, "nodes": nodes, "load": machine.load(), "best": round(max(events / seconds))}
    return found | {
        "median": round(float(np.median(events / seconds))),
        "cpu_us": round(1e6 * float(np.median(cpu / events))),
    }


def report(record: dict) -> str:
    """Markdown: a table for each number of nodes, then what they show."""
    settings, found = record["settings"], record["machine"]
    runs, parameters = record["runs"], 9610
    link = f"{LINK.bits_per_second / 1e6:.0f} Mbit/s and {1e6 * LINK.latency:.0f} us"
    lines = [
        f"Simulated: scikit-learn's digits, {parameters:,} parameters, SGD with momentum 0.9, learning rate "
        f"{settings['learning_rate']:g} with cosine decay, batch {BATCH} a node, medians over the seeds. "
        f"{1e3 * STEP_SECONDS:g} ms a step, one node in {ONE_IN} {SLOW:g} times slower; links of {link}.",
        "Bits are those sent by a node. Within 0.5: when the median accuracy of the mean model is first within 0.5 "
        "points of the final accuracy of large-batch SGD.",
        f"{found['cpu']}, {found['cores']} cores, load {found['load_at_start']}; {record['cpu_seconds']} s of CPU; "
        f"sources {record['source']}; `{record['command']}`.",
    ]
    head = "| algorithm | test accuracy % | train loss | spread | kbit/step | ms/step | Mbit "
    head += "| Mbit within 0.5 | seconds within 0.5 | sent again |"
    for nodes in dict.fromkeys(run["nodes"] for run in runs):
        rows = {name: medians(runs, nodes, name) for name in CASES}
        goal = rows[DENSE]["accuracy"][-1] - 0.5
        seeds = len({run["seed"] for run in runs if run["nodes"] == nodes})
        lines += ["", f"{nodes} nodes, {STEPS[nodes]} steps a node, {seeds} seeds:", "", head, "|---" * 10 + "|"]
        lines += [row_text(name, row, goal) for name, row in rows.items()]
    lines += ["", *claims(runs)]
    for row in record["speed"]:
        what = f"{row['nodes']} nodes x {parameters:,} parameters, 2 local steps of batch {BATCH}, {row['name']}"
        rate = f"{row['median']:,} events per second (best stretch {row['best']:,}) at a load of {row['load']}"
        lines.append(f"Simulator, {what}: {rate}; {row['cpu_us']} us of CPU for an event.")
    return "\n".join(lines)


def medians(runs: list[dict], nodes: int, name: str) -> dict[str, np.ndarray]:
    """The curves of one algorithm, medians over its seeds."""
    same = [run for run in runs if (run["nodes"], run["name"]) == (nodes, name)]
    keys = ("gradients", "seconds", "bits", "resent", "spread", "accuracy", "loss")
    return {key: np.median([run[key] for run in same], axis=0) for key in keys}


def first_within(row: dict[str, np.ndarray], goal: float) -> int | None:
    """The number of the first moment with this accuracy."""
    there = np.flatnonzero(row["accuracy"] >= goal)
    return int(there[0]) if there.size else None


def row_text(name: str, row: dict[str, np.ndarray], goal: float) -> str:
    steps, seconds = row["gradients"][-1], row["seconds"][-1]
    at = first_within(row, goal)
    there = ("-", "-") if at is None else (f"{row['bits'][at] / 1e6:.1f}", f"{row['seconds'][at]:.2f}")
    cells = [f"{row['accuracy'][-1]:.2f}", f"{row['loss'][-1]:.4f}", f"{row['spread'][-1]:.3f}"]
    cells += [f"{row['bits'][-1] / steps / 1e3:.1f}", f"{1e3 * seconds / steps:.2f}", f"{row['bits'][-1] / 1e6:.1f}"]
    return f"| {' | '.join([name, *cells, *there, str(int(row['resent'][-1]))])} |"


def claims(runs: list[dict]) -> list[str]:
    """Sentences that compare SwarmSGD with large-batch SGD and D-PSGD."""
    lines = []
    sizes = list(dict.fromkeys(run["nodes"] for run in runs))
    for nodes in sizes:
        dense, swarm, neighbours = (medians(runs, nodes, name) for name in (DENSE, SWARM, NEIGHBOURS))
        gap = swarm["accuracy"][-1] - dense["accuracy"][-1]
        # The highest accuracy that both reach, and the bits that each has sent when it gets there.
        goal = min(swarm["accuracy"].max(), neighbours["accuracy"].max())
        ours, theirs = (row["bits"][first_within(row, goal)] for row in (swarm, neighbours))
        lines.append(
            f"{nodes} nodes: SwarmSGD with 8 bits ends {gap:+.2f} points from large-batch SGD; it reaches {goal:.2f} % "
            f"with {theirs / ours:.1f} times fewer bits than D-PSGD, and sends "
            f"{neighbours['bits'][-1] / swarm['bits'][-1]:.1f} times fewer in all."
        )
    each = [medians(runs, nodes, SWARM) for nodes in sizes]
    for text, key, unit in (("kbit", "bits", 1e3), ("ms", "seconds", 1e-3)):
        amounts = ", ".join(f"{row[key][-1] / row['gradients'][-1] / unit:.2f}" for row in each)
        lines.append(f"{text} per step, SwarmSGD with 8 bits, {', '.join(map(str, sizes))} nodes: {amounts}.")
    return lines


def plot(runs: list[dict], sizes: list[int], path: Path) -> None:
    """Accuracy against bits and against time, a column for each number of nodes."""
    figure, axes = plt.subplots(
        2, len(sizes), figsize=(4.5 * len(sizes), 7.5), sharey=True, squeeze=False, layout="constrained"
    )
    bottom = 80
    for column, nodes in enumerate(sizes):
        for name in CASES:
            row = medians(runs, nodes, name)
            style = {"color": "black", "linewidth": 2} if name == DENSE else {}
            axes[0, column].plot(row["bits"][1:] / 1e6, row["accuracy"][1:], label=name, **style)
            axes[1, column].plot(row["seconds"][1:], row["accuracy"][1:], **style)
        axes[0, column].set(title=f"{nodes} nodes", xscale="log", xlabel="sent by a node (Mbit)", ylim=(bottom, 100))
        axes[1, column].set(xscale="log", xlabel="simulated time (s)")
    for panel in axes.flat:
        panel.grid(alpha=0.3)
    for panel in axes[:, 0]:
        panel.set_ylabel("test accuracy of the mean model (%)")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
