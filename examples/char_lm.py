"""A small transformer that learns to write like a text file, character by character, with any method of gcjax.

The workers are this machine's accelerators, or virtual CPU devices. Any UTF-8 text of about 100 kB or more will do; its
last tenth is for validation. Writes curves (steps.csv, epochs.csv), result.json, curves.png, sample.txt and checkpoints
into --out. The losses are means per character, in nats.

    python examples/char_lm.py --text FILE --out runs/first                     # about 240,000 parameters, minutes
    python examples/char_lm.py --text FILE --out runs/topk --method "top_k(density=0.01)"
    python examples/char_lm.py --text FILE --out runs/large --width 128 --layers 4 --context 128 --epochs 10
    python examples/char_lm.py --text FILE --out runs/first --resume            # goes on from the last checkpoint
"""

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common import training
from common.checkpoints import Checkpoints
from common.cli import Parser, above_zero, run_command
from common.log import Log, settings_of
from common.networks import Transformer
from common.options import add_training
from common.text import load_text, windows


def make_model(args: argparse.Namespace, alphabet: str) -> Transformer:
    """The network."""
    return Transformer(len(alphabet), args.context, args.width, args.layers, args.heads)


def make_task(args: argparse.Namespace, numbers: np.ndarray, validation: np.ndarray, alphabet: str) -> training.Task:
    """The network, its loss and its data, which `common.text.load_text` returns."""
    model = make_model(args, alphabet)
    # Each epoch starts at another character, so that sequences differ, and skips up to `context` - 1 of them.
    steps = training.steps_of_epoch((len(numbers) - args.context) // args.context, args)

    def init(key):
        return model.init(key, jnp.zeros((1, args.context), jnp.int32))["params"], None

    def cross_entropy(params, sequences):
        logits = model.apply({"params": params}, sequences[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, 1:]).mean()

    def batches(first):
        size = args.workers * args.batch
        for epoch in range(first // steps, args.epochs):
            rng = np.random.default_rng((args.seed, epoch))
            sequences = windows(numbers[rng.integers(args.context) :], args.context)
            order = rng.permutation(len(sequences))[: steps * size]
            for chosen in order.reshape(steps, size)[max(first - epoch * steps, 0) :]:
                yield sequences[chosen]

    held_out = windows(validation, args.context)
    compiled_loss = jax.jit(cross_entropy)

    def evaluate(params, _):
        parts = [held_out[i : i + 256] for i in range(0, len(held_out), 256)]
        losses = [float(compiled_loss(params, part)) for part in parts]
        return {"validation_loss": float(np.average(losses, weights=[len(part) for part in parts]))}

    return training.Task(
        init=init,
        loss=lambda params, batch, key: cross_entropy(params, batch),
        steps=steps,
        batches=batches,
        evaluate=evaluate,
    )


def train(args: argparse.Namespace, task: training.Task) -> tuple[dict[str, Any], Any]:
    """Train from the start, or from the last checkpoint on. Returns the content of result.json, and the parameters."""
    mesh = training.use_devices(args.workers)
    step, state = training.make_step(task, args, mesh)
    parameters, total = training.count(state.params), args.epochs * task.steps
    print(f"{parameters:,} parameters, {args.workers} workers x {args.batch}, {total} steps")

    with Checkpoints(args.out / "checkpoints", settings_of(args) | {"steps": task.steps}) as checkpoints:
        state, done, rows = checkpoints.start(state, args.resume)
        log = Log(args, total, rows)
        for batch in training.place_batches(task.batches(done), mesh):
            begin = time.perf_counter()
            state, metrics = step(state, batch)
            log.add_step(state, metrics, begin)
            if log.done % task.steps == 0:
                log.end_epoch(task.evaluate(*training.on_host(state)))
            if log.done % (args.checkpoint_every or task.steps) == 0 or log.done == total:
                checkpoints.save(log.done, state, log.rows)
    return log.finish(parameters), training.on_host(state)[0]


@partial(jax.jit, static_argnames=("model", "length"))
def sample(
    model: Transformer, params: Any, prompt: jax.Array, key: jax.Array, temperature: float, length: int
) -> jax.Array:
    """Continue a text, drawing each character from those before it.

    Args:
      model: the network.
      params: its parameters.
      prompt: int32[context], the text to continue.
      key: random key.
      temperature: the logits are divided by it.
      length: number of characters to draw.

    Returns:
      int32[length].
    """

    def draw(last, key):
        logits = model.apply({"params": params}, last[None])[0, -1]
        number = jax.random.categorical(key, logits / temperature).astype(last.dtype)
        return jnp.append(last[1:], number), number

    return jax.lax.scan(draw, prompt, jax.random.split(key, length))[1]


def parse_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line, or these arguments."""
    parser = Parser(__doc__)
    count, real = above_zero(int), above_zero(float)
    parser.add_argument("--text", type=Path, required=True, help="file to learn from, UTF-8")
    parser.add_argument("--out", type=Path, default=Path("runs/char_lm"), help="folder for curves and checkpoints")
    parser.add_argument("--context", type=count, default=64, help="characters of a sequence, which is one sample")
    parser.add_argument("--width", type=count, default=96, help="features; a multiple of --heads")
    parser.add_argument("--layers", type=count, default=2, help="of attention and two dense layers each")
    parser.add_argument("--heads", type=count, default=4, help="of attention")
    parser.add_argument("--sample", type=count, default=400, help="characters to write at the end")
    parser.add_argument("--temperature", type=real, default=0.8, help="of the sample: 1 as learned, lower is safer")
    add_training(parser, workers=8, batch=4, epochs=3, learning_rate=3e-3)
    args = parser.parse_args(arguments)
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    return args


def main() -> None:
    """Run the command."""
    args = parse_options()
    numbers, validation, alphabet = load_text(args.text, args.context)
    result, params = train(args, make_task(args, numbers, validation, alphabet))
    prompt, key = jnp.asarray(validation[: args.context]), jax.random.key(args.seed + 3)
    written = sample(make_model(args, alphabet), params, prompt, key, args.temperature, args.sample)
    text = "".join(alphabet[number] for number in written)
    (args.out / "sample.txt").write_text(text, encoding="utf-8", newline="")
    last = result["epochs"][-1]
    print(
        f"\n{text}\n\nvalidation loss {last['validation_loss']:.4f} nats per character, compression ratio "
        f"{result['compression_ratio']:.1f}, wire ratio {result['wire_ratio']:.1f}, {last['wire_bytes'] / 1e6:.1f} MB "
        f"sent per worker, {result['ms_per_step']:.0f} ms a step. Curves and sample: {args.out}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
