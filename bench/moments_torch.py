"""BackPACK's SumGradSquared and torch.func's vmap(grad) on the MLP and the CNN; run by moments.py.

Prints JSON. Fails with a one-line message when torch or BackPACK is not installed.
"""

import json
import sys
import time
import warnings
from collections.abc import Callable

try:
    import torch
    from backpack import backpack, extend
    from backpack.extensions import SumGradSquared
except ImportError as error:
    sys.exit(f"{error}")

from torch import nn

warnings.simplefilter("ignore")


def mlp() -> tuple[nn.Module, tuple[int, ...]]:
    """The model and the shape of an example."""
    return nn.Sequential(nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)), (784,)


def cnn() -> tuple[nn.Module, tuple[int, ...]]:
    """The same of a convolutional network."""
    layers, width = [], 3
    for out in (32, 64, 128):
        for _ in range(2):
            layers += [nn.Conv2d(width, out, 3, padding=1), nn.ReLU()]
            width = out
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(4 * 4 * 128, 256), nn.ReLU(), nn.Linear(256, 10)), (3, 32, 32)


def steps(model: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor) -> dict[str, Callable]:
    """Functions that compute the plain gradient, and the sum of squares in two ways."""
    criterion = nn.CrossEntropyLoss()
    plain_model, extended = model(), extend(model())
    extended_criterion = extend(nn.CrossEntropyLoss())
    functional = model()
    params = {name: p.detach() for name, p in functional.named_parameters()}

    def plain():
        plain_model.zero_grad()
        criterion(plain_model(x), y).backward()

    def with_backpack():
        extended.zero_grad()
        with backpack(SumGradSquared()):
            extended_criterion(extended(x), y).backward()

    def sample_loss(params, x, y):
        return criterion(torch.func.functional_call(functional, params, (x[None],)), y[None])

    per_sample = torch.func.vmap(torch.func.grad(sample_loss), in_dims=(None, 0, 0))

    def with_func():
        grads = per_sample(params, x, y)
        return [((g / len(x)).sum(0), ((g / len(x)) ** 2).sum(0)) for g in grads.values()]

    return {"plain": plain, "backpack": with_backpack, "torch.func": with_func}


def measure(name: str, build: Callable, rounds: int) -> dict:
    model, shape = build()
    del model
    x, y = torch.randn(64, *shape), torch.randint(0, 10, (64,))
    functions = steps(lambda: build()[0], x, y)
    times = {label: [] for label in functions}
    for i in range(rounds + 1):
        for label, fn in functions.items():
            start = time.perf_counter()
            fn()
            if i:
                times[label].append(time.perf_counter() - start)
    row = {"model": name}
    for label, values in times.items():
        ratios = sorted(a / b for a, b in zip(values, times["plain"], strict=True))
        row[label] = {"milliseconds": 1e3 * sorted(values)[rounds // 2], "ratio": ratios[rounds // 2]}
    return row


if __name__ == "__main__":
    count = int(sys.argv[1])
    models = [measure("MLP, batch 64", mlp, count), measure("CNN", cnn, count)]
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "models": models}))
