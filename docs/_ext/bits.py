"""The directive `bits`: a picture of the fields of a word or a message.

    ```{bits} The paper's word
    sign: 1
    exponent: 3
    index: 28
    ```

Each line is a field's name and its bits, a number or a few words. Widths follow the square root of the bits, so that a
field of one bit stays visible.
"""

import html
import math

from docutils import nodes
from docutils.parsers.rst import Directive
from sphinx.application import Sphinx

WIDTH, HEIGHT = 720, 46
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")  # those of the plots


class Bits(Directive):
    has_content = True
    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        fields = [line.split(": ", 1) for line in self.content if line.strip()]
        if any(len(field) != 2 for field in fields):
            raise self.error("each line is a name and its bits, such as `index: 28`")
        caption = self.arguments[0]
        label = f"{caption}: " + ", ".join(f"{name} {size}" for name, size in fields)
        picture = nodes.raw("", _svg(fields, label), format="html")
        figure = nodes.figure("", picture, nodes.caption("", caption))
        return [figure]


def _svg(fields: list[list[str]], label: str) -> str:
    bits = [int(size) if size.isdigit() else 32 for _, size in fields]
    shares = [
        max(math.sqrt(count), 0.3 * len(name), 0.25 * len(size))
        for count, (name, size) in zip(bits, fields, strict=True)
    ]
    parts, left = [], 0.0
    for number, ((name, size), share) in enumerate(zip(fields, shares, strict=True)):
        width, colour = WIDTH * share / sum(shares), COLOURS[number % len(COLOURS)]
        middle = left + width / 2
        parts.append(
            f'<rect x="{left + 1:.1f}" y="1" width="{width - 2:.1f}" height="{HEIGHT - 2}" rx="4" fill="{colour}" '
            f'fill-opacity="0.18" stroke="{colour}"/>'
            f'<text x="{middle:.1f}" y="20">{html.escape(name)}</text>'
            f'<text x="{middle:.1f}" y="37" class="size">{html.escape(size)}</text>'
        )
        left += width
    return (
        f'<div class="bits"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(label)}">'
        f"{''.join(parts)}</svg></div>"
    )


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("bits", Bits)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
