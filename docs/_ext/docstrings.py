"""From the docstrings' plain text to reStructuredText, before napoleon reads their sections.

The docstrings are written for `help()`: `code` has single backticks, code and formulas of several lines are indented
blocks, and errors of a returned function stand under "Raises (from `update`):".
"""

import re

from sphinx.application import Sphinx

RAISES = re.compile(r"(Raises|Returns|Args) \((.+)\):$")
ENTRY = re.compile(r"  (\w[\w, ]*): (.*)$")
CODE = re.compile(r"(?<![`:])(`[^`]+`)(?!`)")
PUBLIC = re.compile(r"`gcjax(\.\w+)+`")
BLOCK = re.compile(r"(^ *>>> .*\n(?:.*\S.*\n?)*|(?<=\n\n) {4,}\S.*\n(?:(?: {4,}.*)?\n)*)", re.M)  # left as it is


def convert(lines: list[str]) -> list[str]:
    """The lines of a docstring, their margin removed, as reStructuredText."""
    lines = _with_inline_markup(lines)
    found: list[str] = []
    section = other = False  # inside `Args:` and its like; inside one with a bracket, which napoleon does not know
    for number, line in enumerate(lines):
        if match := RAISES.match(line):
            found += ["", f"**{match[1]} ({match[2]}):**", ""]
            other, section = True, True
            continue
        if line and not line.startswith(" "):
            section = bool(re.fullmatch(r"[A-Z]\w+:", line))
            other = False
        if other:
            entry = ENTRY.match(line)
            found.append(f"- *{entry[1]}*: {entry[2]}" if entry else line[2:])
            continue
        before = lines[number - 1] if number else ""
        starts = line.startswith("    ") and not before.strip() and not section
        if starts and not any(x.startswith(("  ", ">>>", "..")) for x in _last_paragraph(found)):
            found += ["::", ""]
        found.append(line)
    return found


def _with_inline_markup(lines: list[str]) -> list[str]:
    """Code with double backticks, public names as links, and stars and bars that mean themselves."""
    blocks = BLOCK.split("\n".join(lines))
    return "".join(block if number % 2 else _prose(block) for number, block in enumerate(blocks)).split("\n")


def _prose(text: str) -> str:
    parts = CODE.split(text)
    for number, part in enumerate(parts):
        if number % 2:
            parts[number] = f":py:obj:{part}" if PUBLIC.fullmatch(part) else f"`{part}`"
        else:  # a letter that follows code would keep it from ending
            part = re.sub(r"^(?=\w)", r"\\ ", part) if number else part
            parts[number] = re.sub(r"(?<!\*)\*(?!\*)|\|", r"\\\g<0>", part)
    return "".join(parts)


def _last_paragraph(lines: list[str]) -> list[str]:
    """The last lines that are not empty."""
    kept = [*lines]
    while kept and not kept[-1].strip():
        kept.pop()
    return kept[-1:]


def _process(app, what, name, obj, options, lines: list[str]) -> None:
    lines[:] = convert(lines)


def _skip(app, what, name, obj, skip, options) -> bool | None:
    """Fields are described under Attributes of their class."""
    kind = type(obj).__name__
    return True if kind in ("_tuplegetter", "member_descriptor") or name in ("count", "index") else None


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", _process, priority=100)  # napoleon has 500
    app.connect("autodoc-skip-member", _skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
