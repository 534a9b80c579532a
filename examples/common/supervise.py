"""Child processes that are watched: when one fails, an error message says why, and the rest are ended."""

import argparse
import queue
import re
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import NamedTuple

from common.cli import Stopped

NAME = f"{Path(sys.argv[0]).name}: "
RUNTIME_LOG = re.compile(r"[WEF]\d{4} .*(coordination_service|preemption_|client\.h|add_port)")  # of JAX's runtime


def print_error(text: str) -> None:
    """Print an error of this script as one line."""
    print(NAME + " ".join(text.split()), file=sys.stderr, flush=True)


def process_lost(reason: str) -> str:
    """The error message for a process that died, with what the runtime said."""
    return (
        "lost another process: it has died or cannot be reached any more, so training stops here too. Look for the "
        "cause on the process that did not print this: an error, a kill for lack of memory, a broken link. Then start "
        f"all processes again. The runtime said: {textwrap.shorten(reason, 200, placeholder=' ...')}"
    )


def processes_missing(args: argparse.Namespace) -> str:
    """The error message for processes that never started."""
    return (
        f"not all {args.processes or ''} processes came together at {args.coordinator or 'the coordinator'} in time. "
        "Start each of them once, with the same --coordinator and --processes, and with --process 0, 1, ...; nothing "
        f"but process 0 may listen at that address. --wait gives them more than {args.wait} seconds"
    )


class Ended(NamedTuple):
    """A child process that has ended.

    Attributes:
      number: of the child, from 0.
      status: exit status.
      errors: its standard error without the runtime's log.
      log: the runtime's log.
      explained: whether its errors have a line of this script.
    """

    number: int
    status: int
    errors: str
    log: str
    explained: bool


def supervise(commands: list[list[str]], args: argparse.Namespace) -> int:
    """Run child processes to their end. When one fails, print why and end the rest.

    Args:
      commands: one for each child.
      args: the options of this script.

    Returns:
      The exit status of this process.
    """
    children = [subprocess.Popen(c, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for c in commands]
    ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
    signal.signal(signal.SIGTERM, lambda *_: [child.send_signal(signal.SIGTERM) for child in children])
    live = len(children) == 1
    watchers = [threading.Thread(target=watch, args=(i, child, live, ended)) for i, child in enumerate(children)]
    for thread in watchers:
        thread.start()
    try:
        for _ in children:
            last = ended.get()
            if not live:
                sys.stderr.write(last.errors)
            if last.status:
                break
    except KeyboardInterrupt:
        last = Ended(0, 130, "", "", True)
    for child, thread in zip(children, watchers, strict=True):
        child.kill()
        thread.join()
        child.stdin.close()
    if last.status == 0:
        return 0
    if not last.explained:
        explain(last, args)
    return last.status if last.status in (130, Stopped.status) else 1


def explain(child: Ended, args: argparse.Namespace) -> None:
    """Print why a child failed that did not say so itself."""
    reason = re.search(r"absl::Status: (.*?)(\n\n|\n\*\*\*|$)", child.log, re.DOTALL)
    if "RegisterTask" in child.log:
        print_error(processes_missing(args))
    elif reason:
        print_error(process_lost(reason[1]))
    elif child.status < 0:
        name = signal.Signals(-child.status).name
        number = child.number if args.local else args.process
        print_error(f"process {number} was ended by {name} (by the system, if memory ran out)")
    else:
        sys.stderr.write(child.log)


def watch(number: int, child: subprocess.Popen, live: bool, ended: queue.SimpleQueue[Ended]) -> None:
    """Collect a child's standard error until it ends, its errors apart from the runtime's log.

    Args:
      number: of the child.
      child: the process.
      live: whether to print its errors as they come.
      ended: where to put the result.
    """
    errors: list[str] = []
    log: list[str] = []
    in_log = explained = False
    with child.stderr:
        for line in child.stderr:
            explained |= line.startswith(NAME)
            in_log = not line.startswith(NAME) and (in_log or bool(RUNTIME_LOG.match(line)))
            (log if in_log else errors).append(line)
            if live and not in_log:
                sys.stderr.write(line)
    ended.put(Ended(number, child.wait(), "".join(errors), "".join(log), explained))
