"""Training by several processes, on one machine or many: how they join, and an error message when one is lost.

A script calls `add_options` and `check_options` on its parser, and ends with `sys.exit(run(args, job))`.
"""

import argparse
import os
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import jax

from common.cli import Problem, Stopped, above_zero
from common.supervise import print_error, process_lost, supervise

Job = Callable[[argparse.Namespace], None]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that say which processes train together."""
    count = above_zero(int)
    parser.add_argument("--coordinator", type=address, metavar="HOST:PORT", help="where process 0 runs; any free port")
    parser.add_argument("--processes", type=count, help="number of processes, the same for all")
    parser.add_argument("--process", type=int, help="number of this process, from 0")
    parser.add_argument("--auto", action="store_true", help="let JAX find the three (SLURM, Open MPI, TPU slices)")
    parser.add_argument("--local", type=count, metavar="N", help="run N processes on this machine's CPU")
    parser.add_argument("--wait", type=count, default=10, metavar="SECONDS", help="for the other processes to start")
    parser.add_argument(
        "--heartbeat", type=count, default=10, metavar="SECONDS", help="of silence after which a process counts as lost"
    )
    text = "without a finished step after which a process ends; ten times as long before the first one, to compile it"
    parser.add_argument("--stall", type=count, default=600, metavar="SECONDS", help=text)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Exit with an error if the options of `add_options` contradict each other."""
    joined = [args.coordinator, args.process, args.processes]
    if any(x is not None for x in joined) and None in joined:
        parser.error("--coordinator, --processes and --process go together")
    if not args.child and bool(args.coordinator) + args.auto + bool(args.local) > 1:
        parser.error("--coordinator, --auto and --local exclude each other")
    if args.process is not None and not 0 <= args.process < args.processes:
        parser.error(f"--process must be from 0 to {args.processes - 1}, --processes less one; got {args.process}")


def address(text: str) -> str:
    """Parse HOST:PORT."""
    split_address(text)
    return text


def run(args: argparse.Namespace, job: Job) -> int:
    """Run `job(args)` in this process or, if there are others to join, in a child that this process watches.

    Returns:
      The exit status.
    """
    command = [sys.executable, *sys.argv, "--child"]
    if args.child:
        threading.Thread(target=end_with_parent, daemon=True).start()
    elif args.local:
        os.environ["JAX_PLATFORMS"] = "cpu"
        with socket.socket() as held:  # bound but not listening: JAX can share the port, no other program gets it
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("127.0.0.1", 0))
            join = [f"--coordinator=127.0.0.1:{held.getsockname()[1]}", f"--processes={args.local}"]
            return supervise([[*command, *join, f"--process={i}"] for i in range(args.local)], args)
    elif args.coordinator or args.auto:
        return supervise([command], args)
    work(args, job)
    return 0


# Joining the other processes.


def connect(args: argparse.Namespace) -> None:
    """Join the other processes.

    Raises:
      Problem: they did not come together within about `--wait` seconds, or their options contradict each other.
    """
    limits: dict[str, Any] = {"heartbeat_timeout_seconds": args.heartbeat, "shutdown_timeout_seconds": args.heartbeat}
    if args.auto:
        try:
            jax.distributed.initialize(initialization_timeout=args.wait, **limits)
        except ValueError as error:
            text = f"--auto: JAX found no cluster ({error}). Give --coordinator, --processes and --process"
            raise Problem(text) from error
    if not args.coordinator:
        return
    host, port = split_address(args.coordinator)
    seconds_left = args.wait
    if args.process == 0:
        if listens("localhost", port):
            raise Problem(port_in_use(port))
    else:
        seconds_left -= wait_for(host, port, args.wait)
    if is_loopback(host):
        limits["coordinator_bind_address"] = args.coordinator  # by default the coordinator listens on every interface
    limits["initialization_timeout"] = max(int(seconds_left) - 5, 5)  # JAX waits 5 seconds longer than it is told
    try:
        jax.distributed.initialize(args.coordinator, args.processes, args.process, **limits)
    except jax.errors.JaxRuntimeError as error:
        raise Problem(port_in_use(port) if "start RPC server" in str(error) else str(error)) from error
    if jax.default_backend() == "cpu":
        check_own_name(host)
    if jax.process_count() != args.processes:
        raise Problem(
            f"--processes {args.processes} here, but process 0 expects {jax.process_count()}: they must agree"
        )


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "HOST:PORT"."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, got {address!r}")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the host."""
    return host == "localhost" or host == "::1" or host.startswith("127.")


def port_in_use(port: int) -> str:
    """The error message for a port that process 0 cannot have."""
    return (
        f"port {port} of this machine is in use, perhaps by another training run or one that has not ended yet. Choose "
        "another port for --coordinator, the same for all processes"
    )


def listens(host: str, port: int) -> bool:
    """Whether a program listens at the address."""
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def wait_for(host: str, port: int, seconds: float) -> float:
    """Wait until process 0 listens; return the seconds that took. Raises Problem after `seconds`."""
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
                "there, with the same --coordinator? Does a firewall block the port? --wait gives it more time"
            )
        time.sleep(0.2)
    return time.monotonic() - begin


def check_own_name(coordinator: str) -> None:
    """Raise Problem if this machine's name resolves to an address that the others cannot reach.

    On CPUs the processes exchange data with gloo, which gives the others the address of this machine's name.
    """
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "no address"
    if address == "no address" or (is_loopback(address) and not is_loopback(coordinator)):
        raise Problem(
            f"this machine's name {name!r} resolves to {address}, and gloo would tell the other machines to connect "
            f"there. Add a line to /etc/hosts with the address that they can reach and {name!r}"
        )


# Failures. If a process dies, the others notice in one of two ways. Inside a collective the exchange raises, on CPUs at
# once. Elsewhere the runtime misses heartbeats or its connection to process 0, and aborts the process, which no Python
# code can catch. So each process is a child of another one that watches it and can still print.


def work(args: argparse.Namespace, job: Job) -> None:
    """Run the job in this process. On failure exit at once: an orderly exit would wait for the other processes."""
    status = 1
    try:
        connect(args)
        if jax.distributed.is_initialized():
            threading.Thread(target=end_when_stalled, args=(args.stall,), daemon=True).start()
            if jax.process_index():
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # gloo prints as well
        job(args)
        return
    except Stopped as stopped:
        print_error(str(stopped))
        sys.exit(stopped.status)  # an orderly exit: every process raises this, and each may print it
    except Problem as problem:
        status = problem.status
        print_error(str(problem))
    except KeyboardInterrupt:
        os._exit(130)
    except Exception as error:
        message = str(error).split("\n")[0]
        if isinstance(error, RuntimeError) and re.search("do not agree|never came", message):  # gcjax.check_agreement
            print_error(message)
            sys.exit(1)  # an orderly exit: every process raises this, and each may print it
        if args.child and re.search("gloo|nccl|socket|connection|unavailable|heartbeat", message, re.IGNORECASE):
            print_error(process_lost(message))
        else:
            traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def end_with_parent() -> None:
    """Exit when the pipe from the parent closes, which it does however the parent dies."""
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


_last_step: list[float] = []  # when the last step finished; nothing before the first one


def step_finished() -> None:
    """Note that training goes on. Without it this process ends after `--stall` seconds, if there are others."""
    _last_step[:] = [time.monotonic()]


def end_when_stalled(seconds: float) -> None:
    """Exit when no step has finished for so long: a collective that another process never joins waits for ever."""
    begin = time.monotonic()
    while True:
        last, limit = (_last_step[0], seconds) if _last_step else (begin, 10 * seconds)
        if (left := last + limit - time.monotonic()) <= 0:
            print_error(
                f"no step has finished for {limit:g} seconds, so this process ends. Most likely another process has "
                "stopped, waits for its data, or has fewer steps to do: look at what the others printed last. If a "
                "step, a checkpoint or an evaluation may take so long, give --stall more seconds"
            )
            os._exit(1)
        time.sleep(left)
