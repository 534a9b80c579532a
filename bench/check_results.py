"""List the result files and whether they were measured with the present sources."""

import json
from pathlib import Path

from bench.machine import Parser
from bench.provenance import RESULTS, SOURCES, commits_text, outdated, with_note, write


def status(path: Path) -> str:
    """Whether a result file is current."""
    if path.stem not in SOURCES:
        return "unknown: bench/provenance.py does not say what it depends on"
    commits = outdated(json.loads(path.read_text()), path.stem)
    return f"older than the sources: measured at {commits_text(commits)}" if commits else "current"


def mark(path: Path) -> None:
    """Bring the note at the head of a result's table up to date."""
    table = path.with_suffix(".md")
    if path.stem in SOURCES and table.exists():
        write(table, with_note(table.read_text(), json.loads(path.read_text()), path.stem))


def main() -> None:
    parser = Parser(description=__doc__)
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the result files (default bench/results)")
    parser.add_argument("--mark", action="store_true", help="also write a note into the tables of those that are older")
    args = parser.parse_args()
    for path in sorted(args.folder.glob("*.json")):
        print(f"{path.name:<18} {status(path)}")
        if args.mark:
            mark(path)


if __name__ == "__main__":
    main()
