"""Formulas as MathML, which browsers show without a script and without a network."""

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx


def _inline(translator, node: nodes.Element) -> None:
    translator.body.append(convert(node.astext()))
    raise nodes.SkipNode


def _block(translator, node: nodes.Element) -> None:
    translator.body.append(f'<div class="formula">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    app.config.html_math_renderer = "mathml"
    return {"parallel_read_safe": True, "parallel_write_safe": True}
