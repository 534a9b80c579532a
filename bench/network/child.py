"""What the processes on the hosts share: they do what their parent asks, one JSON line each way.

JAX's and PyTorch's workers both import this module, so it imports neither.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

STATISTICS = Path("/sys/class/net/v0/statistics")
COLUMNS = 1000  # the model is a list of square matrices with this many columns


def serve(handlers: dict[str, Callable[..., dict]]) -> None:
    """Answer requests {"do": NAME, ...} with `handlers[NAME](...)` until the parent closes the pipe or dies."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints
    requests: queue.SimpleQueue = queue.SimpleQueue()

    def listen():
        for line in sys.stdin:
            requests.put(json.loads(line))
        os._exit(0)  # even in the middle of work: an orderly exit waits for the other hosts

    threading.Thread(target=listen, daemon=True).start()
    try:
        while True:
            request = requests.get()
            answer = handlers[request.pop("do")](**request)
            print(json.dumps(answer), file=replies, flush=True)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def take_share(host: int, hosts: int) -> None:
    """Restrict this process to its share of the machine's cores, so that hosts share as few as possible.

    Must be called before JAX or PyTorch are imported: they count the cores then.
    """
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // hosts, 1)
    begin = host * each % len(cores)
    os.sched_setaffinity(0, cores[begin : begin + each])


def timed(run: Callable[[], object], at: float) -> dict:
    """Run at a moment of the monotonic clock, which all processes of a machine share: a barrier that sends nothing."""
    time.sleep(max(at - time.monotonic(), 0))
    begin = time.monotonic()
    run()
    return {"begin": begin, "end": time.monotonic()}


def counters() -> dict:
    """Bytes and packets of this host's link since it exists. A packet is what the kernel hands on: up to 64 kB."""
    return {name: int((STATISTICS / name).read_text()) for name in ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")}
