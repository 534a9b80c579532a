"""The table of methods in the documentation. Run as a script, it writes the table into docs/methods.md."""

import inspect
import pathlib

from gcjax._table import METHODS

PAGE = pathlib.Path(__file__).parents[2] / "docs/methods.md"
BEGIN = "<!-- methods: made by python tests/support/readme_table.py -->\n"
END = "<!-- end of methods -->\n"
HEADER = ("transform", "sends", "bytes for N parameters", "keeps a residual", "source")


def table() -> str:
    """The rows of `METHODS` as a Markdown table."""
    rows = [HEADER]
    for method in METHODS.values():
        call, *others = method.readme.split(" | ")
        summary = inspect.getdoc(method.factory).split("\n")[0]
        rows.append((call, summary.removeprefix("Sends ").removesuffix("."), *others))
    lines = [f"| {' | '.join(row)} |" for row in rows]
    lines.insert(1, "|" + "---|" * len(HEADER))
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """The page's text with the present table between the two marks."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + table() + END + after


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
