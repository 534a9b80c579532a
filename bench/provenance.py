"""Where and from which sources a result was measured, and whether the sources have changed since."""

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shlex
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bench import machine, programs
from bench.machine import ROOT

RESULTS = ROOT / "bench" / "results"
_CIFAR10 = ("bench/table.py", "examples/cifar10.py", "examples/common")
_LOCAL = ("bench/local.py", "examples/gossip.py", "examples/common")
# Result -> the files and folders that it depends on besides the package, its own script first.
SOURCES = {
    "accelerators": ("bench/accelerators",),
    "char_lm": ("bench/char_lm.py", "examples/char_lm.py", "examples/common"),
    "gossip": ("bench/gossip.py",),
    "groups": ("bench/groups.py", "examples/cifar10.py", "examples/char_lm.py", "examples/common"),
    "local": _LOCAL,
    "local-text": _LOCAL,
    "methods": ("bench/methods.py",),
    "moments": ("bench/moments.py", "bench/moments_models.py", "bench/moments_torch.py"),
    "network": ("bench/network",),
    "plan_errors": ("bench/plan_errors.py", "bench/network"),
    "scaling": ("bench/scaling.py",),
    "step": ("bench/step.py",),
    "table-hundred": _CIFAR10,
    "table-long": _CIFAR10,
    "table-paper": _CIFAR10,
    "table-small": _CIFAR10,
    "table-vgg": _CIFAR10,
    "whole": (
        "bench/step.py",
        "bench/whole.py",
        "bench/moments_models.py",
        "bench/network/model.py",
        "bench/accelerators",
    ),
    "wire": ("bench/wire.py",),
}
_NOTE = re.compile(r"^Measured on an earlier version of the sources \(.*\)\.\n\n")


def provenance(result: str, packages: Iterable[str] = ("jax", "jaxlib", "optax", "numpy")) -> dict:
    """Machine, versions, commit, digest of the sources and command, for a result file. No host names, no paths."""
    package = Path(importlib.util.find_spec("gcjax").origin).parent
    if not package.samefile(ROOT / "gcjax"):
        raise SystemExit(f"gcjax is imported from {package}; run `python -m bench.NAME` in the root of this checkout")
    script = SOURCES[result][0].removesuffix(".py").replace("/", ".")
    return {
        **here(packages),
        **origin(result),
        "command": shlex.join(["python", "-m", script, *map(_without_folder, sys.argv[1:])]),
    }


def here(packages: Iterable[str]) -> dict[str, dict]:
    """This machine, and the versions of these packages and of Python."""
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in packages if name != "python"}
    return {"machine": machine.describe(), "versions": versions}


def elsewhere(made: dict, record: dict) -> dict[str, dict]:
    """The `machine` and the `versions` of something that was made, each if it has another than the record."""

    def fixed(found):
        return {name: value for name, value in found.items() if name != "load_at_start"}

    names = (name for name in ("machine", "versions") if name in made)
    return {name: made[name] for name in names if fixed(made[name]) != fixed(record[name])}


def origin(result: str) -> dict[str, str]:
    """What a result is measured from: `commit`, and `source`, which also tells uncommitted changes apart."""
    return {"commit": _commit(), "source": source_digest(result)}


def source_digest(result: str, root: Path = ROOT) -> str:
    """Short SHA-256 of the Python code that a result depends on: the package and the files in `SOURCES`."""
    digest = hashlib.sha256()
    for name in ("gcjax", *SOURCES[result]):
        path = root / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            code = programs.without_docstrings(file.read_text())
            digest.update(f"{file.relative_to(root).as_posix()}\n{code}".encode())
    return digest.hexdigest()[:12]


def outdated(record: dict, result: str) -> list[str]:
    """The commits at which those parts of a record were measured whose sources have changed. Empty: it is current.

    Args:
      record: the content of a result file. Besides the whole, each of its `runs` and its part measured `later` may
        have a `source` and a `commit`. What was `measured` for another `result` counts too. A run that has a `program`
        is current as long as its `command` executes that, whatever else has changed in the sources.
      result: its name in `SOURCES`.
    """
    runs = record.get("runs", [])
    parts = [run for run in runs if "source" in run]
    if not runs or len(parts) < len(runs):
        parts.insert(0, record)
    parts += [record[name] for name in ("later", "measured") if name in record]
    first = record.get("commit") or record.get("machine", {}).get("commit")
    commits = []
    for part in changed(parts, result):
        commit = part.get("commit") or (first if part.get("source") == record.get("source") else None)
        commits.append((commit or "unknown")[:12])
    return list(dict.fromkeys(commits))


def changed(parts: Iterable[dict], result: str) -> list[dict]:
    """Those parts of a record that are not current: see `outdated`."""
    other = [part for part in parts if part.get("source") != source_digest(part.get("result", result))]
    digests = iter(programs.digests(result, [part["command"] for part in other if "program" in part]))
    return [part for part in other if "program" not in part or part["program"] != next(digests)]


def commits_text(commits: list[str]) -> str:
    known = [commit for commit in commits if commit != "unknown"]
    named = [f"commit{'s' if len(known) > 1 else ''} {', '.join(known)}"] if known else []
    return " and ".join(named + (["an unknown commit"] if len(known) < len(commits) else []))


def with_note(text: str, commits: list[str]) -> str:
    """The text of a table, with a first line that names the commits that `outdated` returned, if any."""
    text = _NOTE.sub("", text)
    note = f"Measured on an earlier version of the sources ({commits_text(commits)}).\n\n" if commits else ""
    return note + text.strip("\n") + "\n"


def keep_whole(parser: machine.Parser, args: argparse.Namespace, *names: str) -> None:
    """Exit with an error if one of these options, which measure less or otherwise, would overwrite the usual result."""
    for name in names:
        if args.out == RESULTS and getattr(args, name) != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            parser.error(f"with {option} the result is not the usual one: give it another folder, --out FOLDER")


def save(folder: Path, result: str, record: dict, text: str, indent: int | None = 1) -> None:
    """Write RESULT.json and, with the note where it is due, RESULT.md."""
    write(folder / f"{result}.json", json.dumps(record, indent=indent) + "\n")
    write(folder / f"{result}.md", with_note(text, outdated(record, result)))


def write(path: Path, text: str) -> None:
    """Write all or nothing: an interrupted write leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
        file.write(text)
    os.chmod(file.name, 0o644)
    os.replace(file.name, path)


def machine_line(record: dict) -> str:
    """The machine of a record, for the head of a table; all of them, if some of its runs were made elsewhere."""
    found = [part["machine"] for part in (record, *record.get("runs", [])) if "machine" in part]
    named = [f"{m['cpu']} ({m['architecture']}), {m['cores']} cores, {m['memory_gb']} GB" for m in found]
    return "; some of it on ".join(dict.fromkeys(named)) + "."


def versions_line(record: dict) -> str:
    """Versions, commit, sources and command of a record, for the head of a table."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"{versions}; commit {record['commit'][:12]}, sources {record['source']}; `{record['command']}`."


def _commit() -> str:
    """The checked-out commit. Read from files, as git refuses to work in another user's checkout (sudo)."""
    git = ROOT / ".git"
    try:
        head = (git / "HEAD").read_text().strip()
        if not head.startswith("ref: "):
            return head
        name = head.removeprefix("ref: ")
        if (git / name).exists():
            return (git / name).read_text().strip()
        packed = (git / "packed-refs").read_text().splitlines()
        return next(line.split()[0] for line in packed if line.endswith(f" {name}"))
    except (OSError, StopIteration):
        return "unknown"


def _without_folder(argument: str) -> str:
    return Path(argument).name if os.path.isabs(argument) or os.path.exists(argument) else argument
