"""Training by several processes, of one machine or many: joining the others, and saying why when one is lost.

A script makes its parser with `add_options` and `check_options`, and ends with `sys.exit(run(args, job))`.
"""

import argparse
import os
import queue
import re
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import traceback
from pathlib import Path

import jax

from common.cli import Problem, above_zero

NAME = f"{Path(sys.argv[0]).name}: "
RUNTIME = re.compile(r"[WEF]\d{4} .*(coordination_service|preemption_sync|client\.h|add_port)")  # the runtime's own log


def add_options(parser) -> None:
    count = above_zero(int)
    parser.add_argument("--coordinator", type=address, metavar="HOST:PORT", help="where process 0 runs; any free port")
    parser.add_argument("--processes", type=count, help="number of processes, the same for all")
    parser.add_argument("--process", type=int, help="number of this one, from 0")
    parser.add_argument("--auto", action="store_true", help="let JAX find the three (SLURM, Open MPI, TPU slices)")
    parser.add_argument("--local", type=count, metavar="N", help="run N processes on this machine's CPU")
    parser.add_argument("--wait", type=count, default=10, metavar="SECONDS", help="for the other processes to start")
    parser.add_argument("--heartbeat", type=count, default=10, metavar="SECONDS", help="of silence that mean death")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def check_options(parser, args) -> None:
    joined = [args.coordinator, args.processes, args.process]
    if any(x is not None for x in joined) and None in joined:
        parser.error("--coordinator, --processes and --process go together")
    if not args.child and bool(args.coordinator) + args.auto + bool(args.local) > 1:
        parser.error("--coordinator, --auto and --local exclude each other")
    if args.process is not None and not 0 <= args.process < args.processes:
        parser.error(f"--process must be from 0 to {args.processes - 1}, --processes less one; got {args.process}")


def address(text: str) -> str:
    split_address(text)
    return text


def run(args, job) -> int:
    """`job(args)` in this process, or, if there are others to join, in a child that this one watches; the status."""
    command = [sys.executable, *sys.argv, "--child"]
    if args.child:
        threading.Thread(target=end_with_parent, daemon=True).start()
    elif args.local:
        os.environ["JAX_PLATFORMS"] = "cpu"
        with socket.socket() as held:  # bound but not listening: JAX can have the port, no other program is given it
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("127.0.0.1", 0))
            join = [f"--coordinator=127.0.0.1:{held.getsockname()[1]}", f"--processes={args.local}"]
            return supervise([[*command, *join, f"--process={i}"] for i in range(args.local)], args)
    elif args.coordinator or args.auto:
        return supervise([command], args)
    work(args, job)
    return 0


# Joining the other processes.


def connect(args) -> None:
    """Join the other processes, or raise, after about `--wait` seconds."""
    limits = {"heartbeat_timeout_seconds": args.heartbeat, "shutdown_timeout_seconds": args.heartbeat}
    if args.auto:
        try:
            jax.distributed.initialize(initialization_timeout=args.wait, **limits)
        except ValueError as error:
            text = f"--auto: JAX found no cluster ({error}). Give --coordinator, --processes and --process"
            raise Problem(text) from error
    if not args.coordinator:
        return
    host, port = split_address(args.coordinator)
    left = args.wait
    if args.process == 0:
        if listens("localhost", port):
            raise Problem(in_use(port))
    else:
        left -= wait_for(host, port, args.wait)
    if is_loopback(host):
        limits["coordinator_bind_address"] = args.coordinator  # by default the coordinator listens on every interface
    limits["initialization_timeout"] = max(int(left) - 5, 5)  # JAX waits 5 seconds longer than it is told
    try:
        jax.distributed.initialize(args.coordinator, args.processes, args.process, **limits)
    except jax.errors.JaxRuntimeError as error:
        raise Problem(in_use(port) if "start RPC server" in str(error) else str(error)) from error
    if jax.default_backend() == "cpu":
        check_own_name(host)
    if jax.process_count() != args.processes:
        raise Problem(
            f"--processes {args.processes} here, but process 0 expects {jax.process_count()}: give all the same number"
        )


def split_address(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    return host == "localhost" or host == "::1" or host.startswith("127.")


def in_use(port: int) -> str:
    return (
        f"port {port} of this machine is in use, perhaps by another training or one that has not ended yet. Choose "
        "another port in --coordinator, the same for all processes"
    )


def listens(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def wait_for(host: str, port: int, seconds: float) -> float:
    """Wait until somebody listens at the coordinator's address; the seconds that took."""
    begin = time.monotonic()
    while not listens(host, port):
        try:
            socket.getaddrinfo(host, port)
        except OSError as error:
            raise Problem(
                f"--coordinator: the host name {host!r} cannot be resolved ({error.strerror}). Give the address of the "
                "machine that runs process 0"
            ) from error
        if time.monotonic() - begin > seconds:
            raise Problem(
                f"nobody listened at --coordinator {host}:{port} within {seconds:g} seconds. Is process 0 running "
                "there, with the same --coordinator? Does a firewall close the port? --wait gives it more time"
            )
        time.sleep(0.2)
    return time.monotonic() - begin


def check_own_name(coordinator: str) -> None:
    """On CPUs the processes exchange data with gloo, which tells the others the address of this machine's name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "no address"
    if address == "no address" or (is_loopback(address) and not is_loopback(coordinator)):
        raise Problem(
            f"this machine's name {name!r} resolves to {address}, which gloo would tell the other machines to connect "
            f"to. Put a line with the address that they see and {name!r} into /etc/hosts"
        )


# When something goes wrong. If a process dies, the others notice in one of two ways. Inside a collective: the exchange
# raises, on CPUs at once. Elsewhere: the runtime misses heartbeats, or its connection to process 0, and aborts the
# process, which no Python code can catch. So a process here is a child of one that watches it and can still speak.


def work(args, job) -> None:
    """Do the job in this process. A failure ends it at once: leaving in an orderly way means waiting for the others."""
    status = 1
    try:
        connect(args)
        if jax.distributed.is_initialized() and jax.process_index():
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo prints, too
        job(args)
        return
    except Problem as problem:
        status = 2
        explain(str(problem))
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        text = str(error).split("\n")[0]
        if isinstance(error, RuntimeError) and re.search("do not agree|never came", text):  # as gcjax.check_agreement
            explain(text)
            sys.exit(1)  # in an orderly way: this is raised on all of them, and all may say it
        if args.child and re.search("gloo|nccl|socket|connection|unavailable|heartbeat", text, re.IGNORECASE):
            explain(lost(text))
        else:
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def explain(text: str) -> None:
    print(NAME + " ".join(text.split()), file=sys.stderr, flush=True)


def lost(said: str) -> str:
    return (
        "lost another process: it has died or cannot be reached any more, so training stops here too. The cause is "
        "where this was not printed: look there for an error, a kill for lack of memory, a broken link. Then start "
        f"all processes again. The runtime said: {textwrap.shorten(said, 200, placeholder=' ...')}"
    )


def missing(args) -> str:
    return (
        f"not all {args.processes or ''} processes came together at {args.coordinator or 'the coordinator'} in time. "
        "Start every one of them, with the same --coordinator and --processes, and with --process 0, 1, ..., each "
        f"once; what listens there must be process 0 and nothing else. --wait gives them more than {args.wait} seconds"
    )


def supervise(commands, args) -> int:
    """Run processes of this machine to their end. When one fails, say why and end the rest."""
    children = [subprocess.Popen(c, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    ended: queue.SimpleQueue = queue.SimpleQueue()
    live = len(children) == 1
    watches = [threading.Thread(target=watch, args=(i, child, live, ended)) for i, child in enumerate(children)]
    for thread in watches:
        thread.start()
    try:
        for _ in children:
            number, status, errors, log, explained = ended.get()
            if not live:
                sys.stderr.write(errors)
            if status:
                break
    except KeyboardInterrupt:
        status, log, explained = 130, "", True
    for child, thread in zip(children, watches, strict=True):
        child.kill()
        thread.join()
        child.stdin.close()
    if status == 0:
        return 0
    said = re.search(r"absl::Status: (.*?)(\n\n|\n\*\*\*|$)", log, re.DOTALL)
    if not explained and "RegisterTask" in log:
        explain(missing(args))
    elif not explained and said:
        explain(lost(said[1]))
    elif not explained and status < 0:
        number = number if args.local else args.process
        explain(f"process {number} was ended by {signal.Signals(-status).name} (by the system, if memory ran out)")
    elif not explained:
        sys.stderr.write(log)
    return 130 if status == 130 else 1


def watch(number: int, child, live: bool, ended) -> None:
    """Collect what a child writes to its standard error: its errors, and apart from them the runtime's log."""
    errors, log, quiet, explained = [], [], False, False
    with child.stderr:
        for line in child.stderr:
            explained |= line.startswith(NAME)
            quiet = not line.startswith(NAME) and (quiet or bool(RUNTIME.match(line)))
            (log if quiet else errors).append(line)
            if live and not quiet:
                sys.stderr.write(line)
    ended.put((number, child.wait(), "".join(errors), "".join(log), explained))


def end_with_parent() -> None:
    """The pipe from the parent closes when it dies, however it dies."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)
