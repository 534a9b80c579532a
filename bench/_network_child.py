"""A process of bench/network.py on one of the hosts: it does what its parent asks, one JSON line each way.

What JAX's side and PyTorch's side share; so it imports neither.
"""

import json
import os
import queue
import sys
import threading
import time
from pathlib import Path

STATISTICS = Path("/sys/class/net/v0/statistics")
COLUMNS = 1000  # the model is a list of square matrices of so many columns


def serve(answers) -> None:
    """Answer requests {"do": NAME, ...} by `answers[NAME](...)` until the parent closes the pipe or dies."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # gloo prints
    requests: queue.SimpleQueue = queue.SimpleQueue()

    def listen():
        for line in sys.stdin:
            requests.put(json.loads(line))
        os._exit(0)  # whatever this process is doing: an orderly exit waits for the other hosts

    threading.Thread(target=listen, daemon=True).start()
    try:
        while True:
            request = requests.get()
            answer = answers[request.pop("do")](**request)
            print(json.dumps(answer), file=replies, flush=True)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def timed(run, at: float) -> dict:
    """Run at a moment of the monotonic clock, which all processes of a machine share: a barrier that sends nothing."""
    time.sleep(max(at - time.monotonic(), 0))
    begin = time.monotonic()
    run()
    return {"begin": begin, "end": time.monotonic()}


def counters() -> dict:
    """Bytes and packets of this host's link since it exists. A packet is what the kernel hands on: up to 64 kB."""
    return {name: int((STATISTICS / name).read_text()) for name in ("tx_bytes", "rx_bytes", "tx_packets", "rx_packets")}
