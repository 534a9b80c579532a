"""Command-line options of training: methods, schedules, optimisers."""

import argparse
import ast
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import gcjax
from common.cli import Parser, Problem, above_zero, from_zero

SCHEDULES = ("halve", "steps", "cosine")
MethodChoice = tuple[str, dict[str, Any]]  # name without `_compress`, options


def method_names() -> list[str]:
    """Names of all methods of gcjax and gcjax.contrib, without `_compress`."""
    return sorted(name.removesuffix("_compress") for name in gcjax.methods.__all__ + gcjax.contrib.__all__)


def parse_method(text: str) -> MethodChoice:
    """Parse `--method`.

    Args:
      text: a call with keywords, or a bare name: `variance(alpha=2, threshold=0.1)`, `dense`.

    Returns:
      Name and options: `("variance", {"alpha": 2, "threshold": 0.1})`.

    Raises:
      ArgumentTypeError: no such call, no such method, or no such option of it.
    """
    try:
        tree = ast.parse(text, mode="eval").body
        call = ast.Call(tree, [], []) if isinstance(tree, ast.Name) else tree
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.args:
            raise ValueError
        name = call.func.id
        options = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
    except (SyntaxError, TypeError, ValueError):
        raise argparse.ArgumentTypeError(f"must be like 'top_k(density=0.01)', got {text!r}") from None
    if name not in method_names():
        raise argparse.ArgumentTypeError(f"gcjax has no method {name!r}; it has {', '.join(method_names())}")
    known = set(inspect.signature(_factory(name)).parameters) - {"axis_name", "inner_axis_name"}
    if unknown := set(options) - known:
        raise argparse.ArgumentTypeError(f"{name} has no option {min(unknown)!r}; it has {', '.join(sorted(known))}")
    return name, options


def parse_squares(text: str) -> str | int:
    """Parse `--squares`; ArgumentTypeError if it is neither a word that it knows nor a number of at least 2."""
    if text in ("auto", "samples", "batch"):
        return text
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"must be auto, samples, batch or a number of at least 2, got {text!r}")
    return int(text)


def make_compressor(chosen: MethodChoice, axis_name: str | None, steps: int) -> optax.GradientTransformationExtraArgs:
    """Make the transform of a method.

    Call it after the number of devices is set: a random key is put on a device.

    Args:
      chosen: what `parse_method` returned. An option `key` is a seed; a method that needs one gets 0 by default. An
        option `alpha` of two numbers goes from the first to the second, by the same factor in every step.
      axis_name: mesh axis of the workers, None for a single worker.
      steps: of the run.

    Raises:
      Problem: the method rejects its options.
    """
    name, options = chosen
    make = _factory(name)
    needs_key = inspect.signature(make).parameters.get("key")
    if needs_key is not None and needs_key.default is inspect.Parameter.empty:
        options = {"key": 0, **options}
    if isinstance(options.get("key"), int):
        if not 0 <= options["key"] < 1 << 32:
            raise Problem(
                f"--method {name}: key must be a whole number from 0 to {(1 << 32) - 1}, got {options['key']}"
            )
        options = {**options, "key": jax.random.key(options["key"])}
    if isinstance(alpha := options.get("alpha"), tuple):
        options = {**options, "alpha": _geometric(name, alpha, steps)}
    try:
        return make(**options, axis_name=axis_name)
    except (TypeError, ValueError) as error:
        raise Problem(f"--method {name}: {error}") from None


def _geometric(name: str, ends: tuple, steps: int) -> optax.Schedule:
    if len(ends) != 2 or not all(isinstance(end, int | float) and 0 < end < math.inf for end in ends):
        raise Problem(f"--method {name}: alpha must be a number above 0, or two to go from and to, got {ends}")
    first, last = ends
    return optax.exponential_decay(first, steps, last / first)


def _factory(name: str) -> Callable[..., optax.GradientTransformationExtraArgs]:
    name = f"{name}_compress"
    return getattr(gcjax if hasattr(gcjax, name) else gcjax.contrib, name)


def learning_rate(schedule: str, peak: float, steps: int, epochs: int, warmup_epochs: float = 0.0) -> optax.Schedule:
    """The learning rate of each step.

    Args:
      schedule: "cosine", which falls to 0; "halve", by 2 every twelfth of the run, as the paper does every
        25 of 300 epochs; or "steps", by 10 after 3, 6 and 8 ninths, as Goyal et al. 2017 (arXiv 1706.02677) do after
        30, 60 and 80 of 90 epochs.
      peak: the highest rate.
      steps: of the run.
      epochs: of the run.
      warmup_epochs: epochs in which the rate rises from 0 linearly.
    """
    if schedule == "cosine":
        rate = optax.cosine_decay_schedule(peak, steps)
    elif schedule == "steps":
        rate = optax.piecewise_constant_schedule(peak, {math.ceil(steps * part / 9): 0.1 for part in (3, 6, 8)})
    else:
        every = max(25 * epochs / 300, 1) * steps / epochs
        rate = optax.exponential_decay(peak, math.ceil(every), 0.5, staircase=True)
    rising = warmup_epochs * steps / epochs
    return (lambda step: rate(step) * jnp.minimum((step + 1) / rising, 1)) if rising else rate


def make_optimiser(
    name: str, rate: optax.Schedule, momentum: float, weight_decay: float
) -> optax.GradientTransformation:
    """Adam, or SGD with momentum. Weight decay is added to the averaged gradient, after compression.

    It leaves out biases and the scales of normalisations, as Goyal et al. 2017 (arXiv 1706.02677) do.
    """

    def matrices(params):
        return jax.tree.map(lambda x: x.ndim > 1, params)

    decay = [optax.add_decayed_weights(weight_decay, matrices)] if weight_decay else []
    rule = optax.adam(rate) if name == "adam" else optax.sgd(rate, momentum or None)
    return optax.chain(*decay, rule)


def add_training(
    parser: Parser,
    *,
    workers: int,
    batch: int,
    epochs: int,
    learning_rate: float,
    optimiser: str = "adam",
    schedule: str = "cosine",
) -> None:
    """Add the options of all training examples, with these defaults."""
    count, real, share = above_zero(int), above_zero(float), from_zero(float)
    text = (
        "how gradients are exchanged, with options: 'variance(alpha=2)', 'qsgd(bits=2)', 'power_sgd(rank=4)', 'dense'; "
        "with 'variance(alpha=(0.1, 2))' alpha grows during the run"
    )
    parser.add_argument("--method", type=parse_method, default="variance(alpha=0.5)", help=text)
    text = "of variance: squares of a number of groups of samples, of all samples, or of the whole batch's gradient"
    parser.add_argument("--squares", type=parse_squares, default="auto", metavar="{auto,N,samples,batch}", help=text)
    parser.add_argument("--workers", type=count, default=workers, help="data-parallel workers, one a device")
    parser.add_argument("--batch", type=count, default=batch, help="samples per worker and step")
    parser.add_argument("--epochs", type=count, default=epochs, help="passes over the training data")
    parser.add_argument("--optimiser", choices=("adam", "sgd"), default=optimiser, help="the rule after the method")
    parser.add_argument("--learning-rate", type=real, default=learning_rate, help="at the start; see --schedule")
    text = "of sgd; 0 for methods with momentum of their own"
    parser.add_argument("--momentum", type=share, default=0.9, help=text)
    text = "share of weights, not of biases, added to the gradient"
    parser.add_argument("--weight-decay", type=share, default=0.0, help=text)
    parser.add_argument("--schedule", choices=SCHEDULES, default=schedule, help="of the learning rate")
    text = "over which the learning rate rises from 0"
    parser.add_argument("--warmup-epochs", type=share, default=0.0, help=text)
    parser.add_argument("--seed", type=from_zero(int), default=0, help="of parameters, batches and augmentation")
    text = "go on from the last checkpoint in --out, with the same options"
    parser.add_argument("--resume", action="store_true", help=text)
    text = "steps between checkpoints; those of an epoch if left out"
    parser.add_argument("--checkpoint-every", type=count, metavar="STEPS", help=text)
