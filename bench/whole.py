"""What the criterion adds to a training step, part by part: `python -m bench.step --whole`.

Programs that each do one thing more than the one before: the plain step, with the squares, accumulating and the
criterion, the message, exchange and decoding. Each is a whole training step with Adam of one worker, compiled by
itself. On this CPU they are timed in turns. For TPU v5e and H100 they are compiled for eight devices, and the TPU
compiler's own estimate of cycles is read. Beside them stands top-k, which needs no squares, at the density that the
criterion had.
"""

import argparse
import contextlib
import functools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from bench import machine, provenance

WARM_UP = 10
CPU_MODELS = ("CNN", "transformer", "ResNet-50 at 64 pixels")
TARGETS = {"tpu": ("ResNet-50", "25M in 24"), "gpu": ("ResNet-50",)}
PLAIN, TOP_K = "plain", "top-k"


class Stage(NamedTuple):
    """A program: whether it computes squares, and how (`groups` of `value_and_moments`), and where the method ends."""

    squares: bool = False
    groups: int | str | None = "auto"
    end: str | None = None  # None: no method


STAGES = {
    PLAIN: Stage(),
    "squares of all samples": Stage(True, None),
    "squares": Stage(True),
    "accumulate and criterion": Stage(True, end="criterion"),
    "message": Stage(True, end="message"),
    "exchange and decode": Stage(True, end="mean"),
}


def transform(stage: Stage) -> Any:
    """What stands before Adam."""
    import jax
    import jax.numpy as jnp
    import optax

    import gcjax

    if stage.end:
        return gcjax.variance_compress(axis_name="data")

    def update(updates, state, params=None, *, sum_grad_squared=None, **extra):
        del params, extra
        if stage.squares:  # they must be read, or XLA leaves them out
            updates = jax.tree.map(lambda g, s: jnp.where(s < 0, jnp.nan, g), updates, sum_grad_squared)
        return jax.tree.map(lambda g: jax.lax.pmean(g, "data"), updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@contextlib.contextmanager
def ending(end: str | None) -> Iterator[None]:
    """The method stops there while it is traced: what would follow is replaced by something that costs one pass."""
    import jax.numpy as jnp

    import gcjax._sparse.exchange as exchange_module
    import gcjax.methods.variance as variance_module
    from gcjax._core.compressor import SendReport
    from gcjax._jax_compat import equal_everywhere
    from gcjax._sparse.pipeline import Arrived

    def without_message(message, transport, comm, go):
        mean = message.bucket.split(equal_everywhere(message.values.reshape(-1)))
        report = SendReport(*[jnp.int32(0)] * 5, *[jnp.float32(0)] * 3)
        return exchange_module.Exchanged(mean, message.mask, transport, report)

    def without_decoding(arrived, form, route, divisor):
        return jnp.full(form.bucket.span, equal_everywhere(jnp.sum(arrived.messages).astype(jnp.float32)))

    def without_move(encoded, form, route, comm):
        return Arrived(encoded.messages, encoded.rung, encoded.fill, jnp.float32(0))

    with contextlib.ExitStack() as stack:
        if end == "criterion":
            stack.enter_context(mock.patch.object(variance_module, "exchange", without_message))
        if end == "message":
            stack.enter_context(mock.patch.object(exchange_module, "mean_of", without_decoding))
            stack.enter_context(mock.patch.object(exchange_module, "move", without_move))
        yield


def make_step(stage: Stage, loss: Callable, mesh: Any, method: Any = None) -> Any:
    """The training step of a stage, or of another method."""
    import optax

    import gcjax

    moments = functools.partial(gcjax.value_and_moments, groups=stage.groups) if stage.squares else None
    tx = optax.chain(transform(stage) if method is None else method, optax.adam(1e-3))
    return gcjax.make_train_step(loss, tx, mesh, moments=moments, checks=False, max_skipped=10**6)


def cpu_model(name: str) -> tuple[Callable, Any, Any]:
    """Loss, parameters and batch of one worker."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if name == "CNN":
        from bench.moments_models import cnn

        return cnn()[:3]
    if name == "transformer":
        from bench.network.model import setup

        return setup(0)
    from bench.accelerators.models import resnet50

    rng, model = np.random.default_rng(0), resnet50()

    def value(x):
        fan_in = np.prod(x.shape[:-1]) if len(x.shape) > 1 else 1
        drawn = rng.normal(size=x.shape) / np.sqrt(fan_in) if len(x.shape) > 1 else np.full(x.shape, 0.5)
        return jnp.asarray(drawn, jnp.float32)

    batch = rng.normal(size=(16, 64, 64, 3)), rng.normal(size=(16, 1000))
    return model.loss, jax.tree.map(value, model.params), jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), batch)


def on_this_cpu(job: dict) -> dict:
    """Times of all programs of a model in turns, in this process."""
    import jax

    import gcjax

    loss, params, batch = cpu_model(job["model"])
    mesh = jax.make_mesh((1,), ("data",))
    batch = jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data")))
    found, running = {}, {}

    def start(name: str, stage: Stage, method: Any = None) -> None:
        step = make_step(stage, loss, mesh, method)
        state = step.init(jax.tree.map(lambda x: x.copy(), params))
        with ending(stage.end):
            begin = time.perf_counter()
            compiled = step.lower(state, batch).compile()
        found[name] = {
            "compile_s": round(time.perf_counter() - begin, 1),
            "temporaries_mb": round(compiled.memory_analysis().temp_size_in_bytes / 1e6, 1),
        }
        running[name] = compiled, state, []

    def advance(name: str, timed: bool) -> None:
        compiled, state, times = running[name]
        begin = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        if timed:
            times.append(time.perf_counter() - begin)
        running[name] = compiled, state, times

    for name, stage in STAGES.items():
        start(name, stage)
    last = list(STAGES)[-1]
    sent = []
    for _ in range(WARM_UP + job["repeats"]):
        advance(last, timed=False)
        sent.append(int(gcjax.info(running[last][1].opt_state).sent.sum()))
    size = sum(x.size for x in jax.tree.leaves(params))
    density = statistics.mean(sent[WARM_UP:]) / size
    start(last, STAGES[last])
    start(TOP_K, Stage(), gcjax.top_k_compress(density, axis_name="data"))
    for turn in range(WARM_UP + job["repeats"]):
        for name in running:
            advance(name, timed=turn >= WARM_UP)
    plain = running[PLAIN][2]
    for name, (_, _, times) in running.items():
        found[name] |= {
            "median_ms": round(1e3 * statistics.median(times), 1),
            "min_ms": round(1e3 * min(times), 1),
            "ratio": round(statistics.median(a / b for a, b in zip(times, plain, strict=True)), 3),
        }
    return {"parameters": size, "density": round(density, 4), "programs": found}


def compiled_for(target: str, model: str, name: str) -> dict:
    """What the compiler of a target says of one program; runs in an interpreter that has it."""
    import gcjax
    from bench.accelerators import hlo, targets
    from bench.accelerators.models import MODELS

    mesh, built = targets.mesh_of(target, {"data": 8}), MODELS[model]()
    stage = STAGES.get(name, Stage())
    method = gcjax.top_k_compress(1 / 4, axis_name="data") if name == TOP_K else None
    step = make_step(stage, built.loss, mesh, method)
    with ending(stage.end):
        lowered = targets.lower(step, mesh, built.params, built.batch)
    begin = time.process_time()
    compiled = lowered.compile()
    found = {
        "compile_cpu_s": round(time.process_time() - begin, 1),
        "temporaries_mb": round(compiled.memory_analysis().temp_size_in_bytes / 1e6, 1),
    }
    if target == "tpu":
        program = hlo.parse(compiled.as_text())
        found["cycles"] = hlo.cycles(program, most_costly=False)
        found["cycles_most"] = hlo.cycles(program, most_costly=True)
    return found


def on_accelerator(target: str, model: str) -> dict:
    """Every program, compiled in a process of its own; {} without the compiler."""
    from bench.accelerators import environments

    try:
        python = environments.interpreter(target)
    except environments.Unavailable as error:
        print(error, file=sys.stderr)
        return {}
    programs = {}
    for name in (*STAGES, TOP_K):
        job = json.dumps({"side": "compile", "target": target, "model": model, "name": name})
        command = [str(python), "-m", "bench.step", "--child", job]
        env = environments.variables(target)
        done = subprocess.run(command, env=env, cwd=machine.ROOT, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{target}, {model}, {name} failed:\n{done.stderr}")
        programs[name] = json.loads(done.stdout.splitlines()[-1])
        print(target, model, name, programs[name], file=sys.stderr)
    return {"programs": programs}


def job(job: dict) -> dict:
    """A child's job."""
    if job["side"] == "compile":
        return compiled_for(job["target"], job["model"], job["name"])
    return on_this_cpu(job)


def main(args: argparse.Namespace) -> None:
    """Measure what the result file lacks, and save each row at once."""
    path = provenance.RESULTS / "whole.json"
    settings = {"repeats": args.repeats, "warm_up": WARM_UP}
    record = provenance.provenance("whole") | {"settings": settings, "rows": []}
    if path.is_file():
        before = json.loads(path.read_text())
        if (before["source"], before["settings"]) == (record["source"], settings):
            record = before
    have = {(row["target"], row["model"]) for row in record["rows"]}
    wanted = [("cpu", model) for model in CPU_MODELS] + [(target, m) for target in TARGETS for m in TARGETS[target]]
    for target, model in wanted:
        if (target, model) in have or target not in (args.targets or (target,)):
            continue
        child = {"side": "whole", "model": model, "repeats": args.repeats}
        if target == "cpu":
            found = machine.run_child("bench.step", sys.executable, child, "default")
        else:
            found = on_accelerator(target, model)
        if found:
            record["rows"].append({"target": target, "model": model, **found})
            record["rows"].sort(key=lambda row: wanted.index((row["target"], row["model"])))
            provenance.save(provenance.RESULTS, "whole", record, table(record))
    print(table(record))


def table(record: dict) -> str:
    """Markdown."""
    lines = [provenance.machine_line(record), provenance.versions_line(record)]
    for row in record["rows"]:
        is_cpu = row["target"] == "cpu"
        lines += ["", f"**{row['model']}**, " + (_on_cpu(row) if is_cpu else _compiled(row)), ""]
        columns = ("median_ms", "min_ms") if is_cpu else ("cycles", "cycles_most")
        heads = ("ms", "minimum") if is_cpu else ("cycles", "with the most costly branches")
        lines.append(f"| program | {' | '.join(heads)} | / plain | this part | temporaries MB | compile s |")
        lines.append("|---" * 7 + "|")
        programs, before = row["programs"], None
        base = programs[PLAIN].get(columns[0])
        for name, found in programs.items():
            value = found.get(columns[0])
            cells = [f"{found[column]:,}" if column in found else "-" for column in columns]
            share = "-" if value is None else f"{value / base:.3f}"
            grows = name not in (PLAIN, "squares of all samples", TOP_K) and value is not None
            part = f"{(value - before) / base:+.3f}" if grows else ""
            if name != "squares of all samples":
                before = value
            compile_s = found.get("compile_s", found.get("compile_cpu_s"))
            lines.append(
                f"| {name} | {' | '.join(cells)} | {share} | {part} | {found['temporaries_mb']} | {compile_s} |"
            )
    return "\n".join(lines)


def _on_cpu(row: dict) -> str:
    return f"{row['parameters']:,} parameters, 1 of {1 / row['density']:.1f} is sent: this CPU, one worker."


def _compiled(row: dict) -> str:
    names = {"tpu": "TPU v5e", "gpu": "H100"}
    return f"compiled for eight {names[row['target']]}s, 64 samples each, 1/4 is sent; seconds of a core."
