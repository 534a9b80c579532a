"""Makes power_sgd.npz, the results of two other implementations of PowerSGD.

    git clone https://github.com/epfml/powersgd && python tests/methods/data/make_power_sgd.py powersgd/paper-code

Needs PyTorch, which the tests do not. Two processes over gloo run the authors' `RankKReducer`, with the error feedback
of their training loop, and PyTorch's `powerSGD_hook`, both with rank 2 and from the same first Q. Last made with
PyTorch 2.13.0+cpu and epfml/powersgd at f07be924eda568511c0ca00efdfed06b1d7e6332.

The file has the gradients (int8, in eighths), first_<leaf> (the first Q), and for both, "authors" and "torch", the
updates of all steps and the workers' errors after the last one; all leaves flat and concatenated.
"""

import contextlib
import pathlib
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

SHAPES = [(12, 8), (12, 8), (10, 8), (5,)]
WORKERS, STEPS, RANK = 2, 5, 2


def inputs():
    rng = np.random.default_rng(0)
    size = sum(int(np.prod(shape)) for shape in SHAPES)
    gradients = rng.integers(-40, 41, (STEPS, WORKERS, size)).astype(np.int8)
    first = [rng.normal(size=(shape[1], RANK)).astype(np.float32) for shape in SHAPES if len(shape) > 1]
    return gradients, first


def tensors(flat):
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    return [part.reshape(shape) for part, shape in zip(torch.split(flat, sizes), SHAPES, strict=True)]


def flat(leaves):
    return torch.cat([leaf.reshape(-1) for leaf in leaves])


def by_authors(gradients, first):
    from gradient_reducers import RankKReducer

    reducer = RankKReducer(0, "cpu", lambda *_, **__: contextlib.nullcontext(), reuse_query=True, rank=RANK)
    given = iter(first)
    reducer.set_random = lambda q: q.copy_(torch.from_numpy(next(given)))
    error, updates = torch.zeros(gradients.shape[1]), []
    for g in gradients:
        sent, out, memory = tensors(g + error), tensors(torch.empty_like(g)), tensors(torch.zeros_like(g))
        reducer.reduce(sent, out, memory)
        updates.append(flat(out))
        error = flat(memory)
    return torch.stack(updates), error


class Bucket:
    """The part of PyTorch's GradBucket that the hook uses."""

    def __init__(self, flat):
        self.flat = flat

    def buffer(self):
        return self.flat

    def gradients(self):
        return tensors(self.flat)

    def index(self):
        return 0

    def is_last(self):
        return True


def by_torch(gradients, first):
    state = hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2, min_compression_rate=1)
    state.iter = 2
    state.p_memory_dict[0] = torch.empty(sum(RANK * shape[0] for shape in SHAPES if len(shape) > 1))
    state.q_memory_dict[0] = torch.cat([torch.from_numpy(q).reshape(-1) for q in first])
    updates = []
    for g in gradients:
        bucket = Bucket(g.clone())
        hook.powerSGD_hook(state, bucket).wait()
        updates.append(bucket.flat.clone())
    return torch.stack(updates), state.error_dict[0]


def work(rank, port, target):
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORKERS)
    gradients, first = inputs()
    local = torch.from_numpy(gradients[:, rank].astype(np.float32) / 8)
    made = {"gradients": gradients, "versions": np.array(f"torch {torch.__version__}")}
    made |= {f"first_{leaf}": q for leaf, q in enumerate(first)}
    for name, run in (("authors", by_authors), ("torch", by_torch)):
        updates, error = run(local, first)
        errors = [torch.empty_like(error) for _ in range(WORKERS)]
        dist.all_gather(errors, error)
        made |= {f"{name}_updates": updates.numpy(), f"{name}_errors": torch.stack(errors).numpy()}
    if rank == 0:
        np.savez_compressed(target, **made)


if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    target = pathlib.Path(__file__).with_name("power_sgd.npz")
    torch.multiprocessing.start_processes(work, (29512, target), nprocs=WORKERS, start_method="fork")
