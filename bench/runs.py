"""Tables of long runs: options, a result file that grows by one run at a time, the table made of it.

Finished runs are kept, so an interrupted table continues where it stopped. One is run again if its options, or the
program that it executes, have changed since.
"""

import argparse
import concurrent.futures
import json
import shlex
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
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


def measure(
    store: dict,
    path: Path,
    commands: Mapping[Job, str],
    job_of: Callable[[dict], Job],
    run: Callable[[Job], dict],
    at_once: int = 1,
) -> None:
    """Run what the store lacks, and what it has of another command or from other sources.

    Write the store after each run. None begins after one has failed.

    Args:
      store: the content of the result file.
      path: of that file.
      commands: of each job, as the records of its runs have it.
      job_of: job_of(record) -> the job it is of.
      run: run(job) -> its record.
      at_once: number of runs at the same time.
    """
    same = [record for record in store["runs"] if commands.get(job_of(record)) == record["command"]]
    old = provenance.changed(same, path.stem)
    current = {job_of(record) for record in same if record not in old}
    jobs = [job for job in commands if job not in current]
    origin = provenance.origin(path.stem)  # the sources may change before the next call
    origin |= provenance.elsewhere(provenance.here(store["versions"]), store)
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
            store["runs"] = [other for other in store["runs"] if job_of(other) != job] + [record]
            provenance.write(path, json.dumps(store, indent=1))
            bar.update()

    with tqdm(total=len(jobs), unit="run") as bar, concurrent.futures.ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run_and_keep, jobs))


def method(record: dict) -> str:
    """What a run had as `--method`."""
    words = shlex.split(record["command"])
    return words[words.index("--method") + 1]


def report(store: dict, path: Path, table: str) -> None:
    """Write and print the table, with a note if the sources have changed since it was measured."""
    text = provenance.with_note(table, provenance.outdated(store, path.stem))
    provenance.write(path.with_suffix(".md"), text)
    print(text)
