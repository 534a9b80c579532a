"""PyTorch's worker, the process on one host: DistributedDataParallel over gloo."""

import math
import os

from bench.network.child import COLUMNS, counters, serve, take_share, timed

# Name -> the rank of the PowerSGD hook, None without it.
ROWS = {
    "DDP float32": None,
    "DDP float16 hook": None,
    "DDP PowerSGD hook 1": 1,
    "DDP PowerSGD hook 2": 2,
    "DDP PowerSGD hook 4": 4,
}
WITHOUT = "DDP without exchange"  # what all rows contain
BATCH = 32
DENSE_STEPS = 2  # before the PowerSGD hook starts: the fewest that it allows
ONE_BUCKET = 1 << 30  # bytes. With several buckets the PowerSGD hook hangs over gloo


def wire_bytes(row: str, shapes: list[tuple[int, ...]], hosts: int) -> float:
    """What a host sends with ring all-reduces of the gradients of these shapes."""
    return 2 * (hosts - 1) / hosts * sum(_bytes(row, shape) for shape in shapes)


def _bytes(row: str, shape: tuple[int, ...]) -> int:
    """Of one gradient that the hook has made smaller. PowerSGD leaves those alone that it would not halve."""
    size, rank = math.prod(shape), ROWS[row]
    factors = sum((shape[0], size // shape[0])) * (rank or 0)
    if rank is not None and len(shape) > 1 and 2 * factors < size:
        size = factors
    return (2 if row == "DDP float16 hook" else 4) * size


class Worker:
    """Handles the parent's requests; see `child.serve`."""

    def join(self, host: int, hosts: int, address: str, parameters: int) -> dict:
        take_share(host, hosts)
        os.environ["GLOO_SOCKET_IFNAME"] = "v0"
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=host, world_size=hosts)
        dist._DEFAULT_FIRST_BUCKET_BYTES = ONE_BUCKET
        self.host, self.hosts, self.parameters = host, hosts, parameters
        torch.manual_seed(host)
        self.runs: dict = {}
        self.shapes: dict = {}
        return {"torch": torch.__version__}

    def prepare(self, row: str) -> dict:
        """Forward and backward pass of a list of matrices."""
        import torch

        layers = [torch.nn.Linear(COLUMNS, COLUMNS, bias=False) for _ in range(self.parameters // COLUMNS**2)]
        for layer in layers:
            torch.nn.init.normal_(layer.weight, std=COLUMNS**-0.5)  # keeps all gradients of the order of 1
        inputs = torch.randn(BATCH, COLUMNS)
        return self._prepare(row, torch.nn.Sequential(*layers), lambda model: model(inputs).square().mean())

    def prepare_training(self, row: str) -> dict:
        """Training step of the transformer that `model.setup` makes for JAX."""
        import torch

        model, tokens = transformer(self.host)

        def loss(model):
            logits = model(tokens[:, :-1])
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

        return self._prepare(row, model, loss, torch.optim.Adam(model.parameters(), 1e-3))

    def _prepare(self, row, model, loss, optimiser=None) -> dict:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        self.shapes[row] = [tuple(p.shape) for p in model.parameters()]
        model = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET >> 20)
        if row == "DDP float16 hook":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif ROWS.get(row):
            state = powerSGD_hook.PowerSGDState(None, ROWS[row], start_powerSGD_iter=DENSE_STEPS)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

        def run():
            model.zero_grad()
            loss(model).backward()
            if optimiser is not None:
                optimiser.step()

        def run_alone():
            with model.no_sync():
                run()

        self.runs[row] = run_alone if row == WITHOUT else run
        return {"parameters": sum(map(math.prod, self.shapes[row]))}

    def step(self, row: str, at: float) -> dict:
        return timed(self.runs[row], at)

    def report(self, row: str) -> dict:
        """What this worker sent in its last step."""
        return {"wire_bytes": 0.0 if row == WITHOUT else wire_bytes(row, self.shapes[row], self.hosts)}


def transformer(host: int):
    """The model of `model.setup`, and the host's batch."""
    import torch

    from bench.network.model import DEPTH, HEADS, LENGTH, WIDTH, WORDS, sequences

    class Transformer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = torch.nn.Embedding(WORDS, WIDTH)
            self.positions = torch.nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
            self.layers = torch.nn.ModuleList(
                torch.nn.TransformerEncoderLayer(
                    WIDTH, HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
                )
                for _ in range(DEPTH)
            )
            self.norm, self.out = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WORDS)
            self.mask = torch.nn.Transformer.generate_square_subsequent_mask(LENGTH)

        def forward(self, tokens):
            x = self.embedding(tokens) + self.positions
            for layer in self.layers:
                x = layer(x, src_mask=self.mask, is_causal=True)
            return self.out(self.norm(x))

    return Transformer(), torch.from_numpy(sequences(host)).long()


if __name__ == "__main__":
    worker = Worker()
    names = ("join", "prepare", "prepare_training", "step", "report")
    serve({name: getattr(worker, name) for name in names} | {"counters": counters})
