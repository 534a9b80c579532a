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
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from common.cli import Parser, Problem, above_zero, run_command
from common.log import write
from common.networks import Transformer
from common.options import add_training, check_training
from common.text import load_text, windows
from common.training import Task, train


def make_task(args: argparse.Namespace, numbers: np.ndarray, validation: np.ndarray, alphabet: str) -> Task:
    """The task of training on a text as `common.text.load_text` returns it."""
    size = args.workers * args.batch
    # Each epoch starts at another character, so that sequences differ, and skips up to `context` - 1 of them.
    steps = (len(numbers) - args.context) // args.context // size
    if not steps:
        raise Problem(
            f"--workers {args.workers} times --batch {args.batch} sequences of --context {args.context} are more than "
            f"the {len(numbers):,} characters to train on: lower one of them, or give a longer --text"
        )
    model = Transformer(len(alphabet), args.context, args.width, args.layers, args.heads)

    def init(key):
        return model.init(key, jnp.zeros((1, args.context), jnp.int32))["params"], None

    def cross_entropy(params, sequences):
        logits = model.apply({"params": params}, sequences[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, sequences[:, 1:]).mean()

    def batches(epoch, first=0):
        rng = np.random.default_rng((args.seed, epoch))
        sequences = windows(numbers[rng.integers(args.context) :], args.context)
        for chosen in rng.permutation(len(sequences))[: steps * size].reshape(steps, size)[first:]:
            yield sequences[chosen]

    held_out = windows(validation, args.context)
    compiled_loss = jax.jit(cross_entropy)

    def evaluate(params, _):
        parts = [held_out[i : i + 256] for i in range(0, len(held_out), 256)]
        losses = [float(compiled_loss(params, part)) for part in parts]
        return {"validation_loss": float(np.average(losses, weights=[len(part) for part in parts]))}

    def write_sample(params, _):
        prompt = jnp.asarray(validation[: args.context])
        key = jax.random.key(args.seed + 3)
        written = sample(model, params, prompt, key, args.temperature, args.sample)
        text = "".join(alphabet[number] for number in written)
        write(args.out / "sample.txt", text)
        print(f"\n{text}\n")

    return Task(
        init=init,
        loss=lambda params, batch, key: cross_entropy(params, batch),
        steps=steps,
        batches=batches,
        prepare=lambda key, batch: batch,
        evaluate=evaluate,
        end=write_sample,
    )


@partial(jax.jit, static_argnames=("model", "length"))
def sample(
    model: Transformer, params: Any, prompt: jax.Array, key: jax.Array, temperature: float, length: int
) -> jax.Array:
    """Continue a text, drawing each character from those before it.

    Args:
      model: the network.
      params: its parameters.
      prompt: int32[context], what to continue.
      key: random key.
      temperature: what the logits are divided by.
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
    parser = Parser(description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
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
    check_training(parser, args)
    if args.width % args.heads:
        parser.error(f"--width {args.width} must be a multiple of --heads {args.heads}")
    return args


def main() -> None:
    """Run the command."""
    args = parse_options()
    result = train(make_task(args, *load_text(args.text, args.context)), args)
    last = result["epochs"][-1]
    print(
        f"validation loss {last['validation_loss']:.4f} nats per character, compression ratio "
        f"{result['compression_ratio']:.1f}, wire ratio {result['wire_ratio']:.1f}, {last['wire_bytes'] / 1e6:.1f} MB "
        f"sent per worker, {result['ms_per_step']:.0f} ms a step. Curves and sample: {args.out}"
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
