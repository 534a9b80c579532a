"""PyTorch's worker, the process on one host: DistributedDataParallel over gloo."""

import os

from bench.network.child import COLUMNS, counters, serve, timed

# Name -> the rank of the PowerSGD hook, None without it.
ROWS = {
    "DDP float32": None,
    "DDP float16 hook": None,
    "DDP PowerSGD hook 1": 1,
    "DDP PowerSGD hook 2": 2,
    "DDP PowerSGD hook 4": 4,
}
WITHOUT = "DDP without exchange"  # the forward and backward pass, which all rows contain
BATCH = 32
DENSE_STEPS = 2  # before the PowerSGD hook starts: the fewest that it allows
ONE_BUCKET = 1 << 30  # bytes. With several buckets the PowerSGD hook hangs over gloo


def wire_bytes(row: str, parameters: int, hosts: int) -> float:
    """What a host sends with ring all-reduces."""
    rank = ROWS[row]
    per_matrix = COLUMNS**2 if rank is None else 2 * rank * COLUMNS
    width = 2 if row == "DDP float16 hook" else 4
    return 2 * (hosts - 1) / hosts * width * per_matrix * parameters / COLUMNS**2


class Worker:
    """Handles the parent's requests; see `child.serve`."""

    def join(self, host: int, hosts: int, address: str, parameters: int) -> dict:
        os.environ["GLOO_SOCKET_IFNAME"] = "v0"
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=host, world_size=hosts)
        dist._DEFAULT_FIRST_BUCKET_BYTES = ONE_BUCKET
        self.parameters = parameters
        torch.manual_seed(host)
        self.inputs = torch.randn(BATCH, COLUMNS)
        self.runs: dict = {}
        return {"torch": torch.__version__}

    def prepare(self, row: str) -> dict:
        import torch
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
        from torch.nn.parallel import DistributedDataParallel

        layers = [torch.nn.Linear(COLUMNS, COLUMNS, bias=False) for _ in range(self.parameters // COLUMNS**2)]
        for layer in layers:
            torch.nn.init.normal_(layer.weight, std=COLUMNS**-0.5)  # keeps all gradients of the order of 1
        model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=ONE_BUCKET >> 20)
        if row == "DDP float16 hook":
            model.register_comm_hook(None, default_hooks.fp16_compress_hook)
        elif ROWS.get(row):
            state = powerSGD_hook.PowerSGDState(None, ROWS[row], start_powerSGD_iter=DENSE_STEPS)
            model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

        def run():
            model.zero_grad()
            model(self.inputs).square().mean().backward()

        def run_alone():
            with model.no_sync():
                run()

        self.runs[row] = run_alone if row == WITHOUT else run
        return {}

    def step(self, row: str, at: float) -> dict:
        return timed(self.runs[row], at)


if __name__ == "__main__":
    worker = Worker()
    serve({name: getattr(worker, name) for name in ("join", "prepare", "step")} | {"counters": counters})
