"""Command-line options of training: methods, schedules, optimisers."""

import argparse
import ast
import inspect
import math

import jax
import jax.numpy as jnp
import optax

import gcjax
from common.cli import Problem, above_zero, from_zero

SCHEDULES = ("halve", "steps", "cosine", "constant")


def methods() -> list[str]:
    """Names of all methods of gcjax, without the ending `_compress`."""
    return sorted(name.removesuffix("_compress") for name in gcjax.__all__ if name.endswith("_compress"))


def method(text: str):
    """`variance(alpha=2, threshold=0.1)` -> ("variance", {"alpha": 2, "threshold": 0.1}); a bare name is enough."""
    try:
        tree = ast.parse(text, mode="eval").body
        name, given = (tree.id, []) if isinstance(tree, ast.Name) else (tree.func.id, tree.keywords)
        if isinstance(tree, ast.Call) and tree.args:
            raise ValueError
        options = {keyword.arg: ast.literal_eval(keyword.value) for keyword in given}
    except (SyntaxError, ValueError, AttributeError):
        raise argparse.ArgumentTypeError(f"must be like 'top_k(density=0.01)', got {text!r}") from None
    if name not in methods():
        raise argparse.ArgumentTypeError(f"gcjax has no method {name!r}; it has {', '.join(methods())}")
    known = set(inspect.signature(_factory(name)).parameters) - {"axis_name", "inner_axis_name"}
    if unknown := set(options) - known:
        raise argparse.ArgumentTypeError(f"{name} has no option {min(unknown)!r}; it has {', '.join(sorted(known))}")
    return name, options


def make_compressor(chosen, axis_name):
    """The transform. A method that draws random numbers gets `key=0` unless it is given another whole number.

    Not while options are parsed: a key needs a device, and how many there are is not yet settled then.
    """
    name, options = chosen
    make = _factory(name)
    needs_key = inspect.signature(make).parameters.get("key")
    if needs_key is not None and needs_key.default is inspect.Parameter.empty:
        options = {"key": 0, **options}
    if isinstance(options.get("key"), int):
        options = {**options, "key": jax.random.key(options["key"])}
    try:
        return make(**options, axis_name=axis_name)
    except (TypeError, ValueError) as error:
        raise Problem(f"--method {name}: {error}") from None


def _factory(name: str):
    return getattr(gcjax, f"{name}_compress")


def learning_rate(schedule: str, peak: float, steps: int, epochs: int, warmup_epochs: float = 0.0):
    """Learning rate by step.

    halve: by 2 every twelfth of the run, as the paper does every 25 of 300 epochs. steps: by 10 after 3, 6 and 8
    ninths, as Goyal et al. 2017 (arXiv 1706.02677) do after 30, 60 and 80 of 90 epochs; they warm up for 5 epochs.
    """
    if schedule == "constant":
        rate = optax.constant_schedule(peak)
    elif schedule == "cosine":
        rate = optax.cosine_decay_schedule(peak, steps)
    elif schedule == "steps":
        rate = optax.piecewise_constant_schedule(peak, {math.ceil(steps * part / 9): 0.1 for part in (3, 6, 8)})
    else:
        every = max(25 * epochs / 300, 1) * steps / epochs
        rate = optax.exponential_decay(peak, math.ceil(every), 0.5, staircase=True)
    rising = warmup_epochs * steps / epochs
    return (lambda step: rate(step) * jnp.minimum((step + 1) / rising, 1)) if rising else rate


def make_optimiser(name: str, rate, momentum: float, weight_decay: float):
    """Adam, or SGD with momentum; weight decay is added to the averaged gradient, after compression."""
    decay = [optax.add_decayed_weights(weight_decay)] if weight_decay else []
    rule = optax.adam(rate) if name == "adam" else optax.sgd(rate, momentum or None)
    return optax.chain(*decay, rule)


def add_training(parser, *, workers, batch, epochs, learning_rate, optimiser="adam", schedule="cosine") -> None:
    """The options that all training examples have."""
    count, real = above_zero(int), above_zero(float)
    text = (
        "how gradients are exchanged, with options: 'variance(alpha=2)', 'qsgd(bits=2)', 'power_sgd(rank=4)', 'dense'"
    )
    parser.add_argument("--method", type=method, default="variance(alpha=1.5)", help=text)
    text = "of variance: sums over samples, over 4 parts of the batch, or the square of the whole batch's gradient"
    parser.add_argument("--squares", choices=("samples", "microbatches", "batch"), default="samples", help=text)
    parser.add_argument("--workers", type=count, default=workers, help="data-parallel workers, one a device")
    parser.add_argument("--batch", type=count, default=batch, help="samples per worker and step")
    parser.add_argument("--epochs", type=count, default=epochs, help="passes over the training data")
    parser.add_argument("--optimiser", choices=("adam", "sgd"), default=optimiser, help="what follows the method")
    text = "at the start; see --schedule"
    parser.add_argument("--learning-rate", type=real, default=learning_rate, help=text)
    parser.add_argument("--momentum", type=from_zero, default=0.9, help="of sgd; 0 for methods that have it inside")
    parser.add_argument(
        "--weight-decay", type=from_zero, default=0.0, help="share of the parameters that joins the gradient"
    )
    parser.add_argument("--schedule", choices=SCHEDULES, default=schedule, help="of the learning rate")
    parser.add_argument("--warmup-epochs", type=from_zero, default=0.0, help="in which the learning rate rises from 0")
    parser.add_argument("--seed", type=int, default=0, help="of parameters, batches and augmentation")
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
