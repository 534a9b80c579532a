"""List the result files and whether they were measured with the present sources."""

import json
from pathlib import Path

from bench.machine import Parser
from bench.provenance import RESULTS, SOURCES, commits_text, outdated, with_note, write


def check(path: Path, mark: bool = False) -> str:
    """Whether a result file is current.

    Args:
      path: of the file.
      mark: whether to bring the note at the head of its table up to date.
    """
    if path.stem not in SOURCES:
        return "unknown: bench/provenance.py does not say what it depends on"
    commits, table = outdated(json.loads(path.read_text()), path.stem), path.with_suffix(".md")
    if mark and table.exists():
        write(table, with_note(table.read_text(), commits))
    return f"older than the sources: measured at {commits_text(commits)}" if commits else "current"


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the result files (default bench/results)")
    parser.add_argument("--mark", action="store_true", help="also write a note into the tables of those that are older")
    args = parser.parse_args()
    for path in sorted(args.folder.glob("*.json")):
        print(f"{path.name:<18} {check(path, args.mark)}", flush=True)


if __name__ == "__main__":
    main()
