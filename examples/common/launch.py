"""How the processes of one training join, on one machine or several."""

import argparse
import os
import socket
import subprocess
import sys
import time

import jax

from common.cli import Parser, above_zero


def add_options(parser: Parser) -> None:
    """Add the options that say which processes train together."""
    count = above_zero(int)
    parser.add_argument("--coordinator", metavar="HOST:PORT", help="where process 0 runs; any free port")
    parser.add_argument("--processes", type=count, help="number of processes, the same for all")
    parser.add_argument("--process", type=int, help="number of this process, from 0")
    parser.add_argument("--auto", action="store_true", help="let JAX find the three (SLURM, Open MPI, TPU slices)")


def check_options(parser: Parser, args: argparse.Namespace) -> None:
    """Exit with an error if one of the options of `add_options` lacks the others."""
    joined = [args.coordinator, args.processes, args.process]
    if any(x is not None for x in joined) and None in joined:
        parser.error("--coordinator, --processes and --process go together")


def connect(args: argparse.Namespace) -> None:
    """Join the other processes, if the options say that there are any."""
    # A process that is lost ends the others after so many seconds; JAX waits for 100 and 300 by default.
    limits = {"heartbeat_timeout_seconds": 30, "shutdown_timeout_seconds": 30}
    if args.auto:
        jax.distributed.initialize(**limits)
    elif args.coordinator:
        jax.distributed.initialize(args.coordinator, args.processes, args.process, **limits)


def run_locally(count: int) -> int:
    """Run this script's command in so many processes on this machine's CPU, joined. Only the first prints on stdout.

    Returns:
      The exit status: that of the first process that failed, after which the others are ended, or 0.
    """
    with socket.socket() as held:  # finds a free port
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
    children = []
    for process in range(count):
        join = [f"--coordinator=127.0.0.1:{port}", f"--processes={count}", f"--process={process}"]
        quiet = subprocess.DEVNULL if process else None
        command, variables = [sys.executable, *sys.argv, *join], os.environ | {"JAX_PLATFORMS": "cpu"}
        children.append(subprocess.Popen(command, env=variables, stdout=quiet))
    try:
        while None in (ends := [child.poll() for child in children]) and not any(ends):
            time.sleep(0.1)
        return next(filter(None, ends), 0)
    finally:
        for child in children:
            child.kill()
            child.wait()
