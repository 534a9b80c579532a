"""Tables of long runs: options, a result file that grows by one run at a time, the table made of it.

Finished runs are kept, so an interrupted table continues where it stopped.
"""

import argparse
import concurrent.futures
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from tqdm import tqdm

from bench import machine, provenance

Job = TypeVar("Job")


def make_parser(doc: str, work: str, files: str, rows: Iterable[str], rows_help: str) -> argparse.ArgumentParser:
    """A parser with the options of every table of runs.

    Args:
      doc: of the script; its first paragraph is the description.
      work: folder for what the runs leave.
      files: the names of the result files, for the help.
      rows: all that there are.
      rows_help: says of the option --rows what it takes.
    """
    parser = machine.Parser(description=doc.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=rows, default=list(rows), metavar="ROW", help=rows_help)
    parser.add_argument("--work", type=Path, default=Path(work), help="folder for curves and checkpoints")
    parser.add_argument("--out", type=Path, default=provenance.RESULTS, help=f"folder for {files}")
    parser.add_argument("--report", action="store_true", help="run nothing: make the table from the result file")
    return parser


def load(path: Path, report: bool, packages: Sequence[str]) -> dict:
    """The content of a result file, or what a new one begins with.

    Args:
      path: of the result file; its stem is the result's name in `provenance.SOURCES`.
      report: whether there must be one.
      packages: whose versions a new file names.
    """
    if path.is_file():
        return json.loads(path.read_text())
    if report:
        script = Path(provenance.SOURCES[path.stem][0]).name
        raise SystemExit(f"{script}: there is no {path} to report; leave out --report to measure")
    return provenance.provenance(path.stem, packages) | {"runs": []}


def measure(store: dict, path: Path, jobs: Sequence[Job], run: Callable[[Job], dict], at_once: int = 1) -> None:
    """Run the jobs, some at once, and write the store after each of them. None begins after one has failed."""
    origin = provenance.origin(path.stem)  # the sources may change before the next call
    lock, failed = threading.Lock(), threading.Event()

    def run_and_keep(job: Job) -> None:
        if failed.is_set():
            return
        try:
            record = run(job) | origin
        except BaseException:
            failed.set()
            raise
        with lock:
            store["runs"].append(record)
            provenance.write(path, json.dumps(store, indent=1))
            bar.update()

    with tqdm(total=len(jobs), unit="run") as bar, concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run_and_keep, jobs))


def report(store: dict, path: Path, table: str) -> None:
    """Write and print the table, with a note if the sources have changed since it was measured."""
    text = provenance.with_note(table, store, path.stem)
    provenance.write(path.with_suffix(".md"), text)
    print(text)
