"""`explain_moments`: the rule that makes each parameter's moments, and its memory."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from gcjax import _jax_compat
from gcjax._moments.api import choose_method
from gcjax._moments.jaxprs import aval
from gcjax._moments.problem import Options, make_problem
from gcjax._moments.rules.node import Node, PerSample
from gcjax._types import PyTree

# A gradient that one of these makes is a cotangent or a sum of cotangents: no rule could avoid stacking it.
COTANGENTS = {"reduce_sum", "mul", "add", "add_any", "sub", "neg", "div", "select_n", "broadcast_in_dim", "input"}
HEADER = ("leaf", "shape", "rule", "positions", "squares of", "bytes", "fallback")


class Row(NamedTuple):
    """The way to the moments of one parameter.

    Attributes:
      leaf: path of the parameter.
      shape: its shape.
      rule: name of the sink, with "scanned", "over time" or "mixed" for operations between it and the parameter;
        "tied" or "concatenated" for several sinks; "vmap" for a gradient that vmap stacks over samples; "scan" for one
        that is made sample by sample.
      positions: contracted entries per sample (sequence positions, pixels); 1 is an outer product.
      squares: number of gradients whose squares are added up for one chunk of the batch, of samples or of groups.
      bytes: read by the rule for one chunk of the batch: operands that the plain backward pass holds too, or stacked
        gradients.
      fallback: whether a rule was missing, so that an array of batch x parameter is made.
    """

    leaf: str
    shape: tuple[int, ...]
    rule: str
    positions: int
    squares: int
    bytes: int
    fallback: bool


class Explanation(NamedTuple):
    """The plan of `value_and_moments`; its `str` is a table.

    Attributes:
      rows: one `Row` per parameter.
      groups: number of samples (or microbatches) in the batch.
      chunk: number of them that are processed at a time.
      method: the method that would run, "sinks", "vmap" or "scan".
    """

    rows: tuple[Row, ...]
    groups: int
    chunk: int
    method: str

    def __str__(self) -> str:
        table = [HEADER]
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            numbers = str(row.positions), str(row.squares), f"{row.bytes:,}"
            table.append((row.leaf, shape, row.rule, *numbers, "yes" if row.fallback else ""))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        total = f"{self.groups} samples by {self.method}, {self.chunk} at a time"
        return "\n".join([*lines, total])


def explain_moments(
    loss_fn: Callable[[PyTree, PyTree], Any], has_aux: bool = False, **keywords: Any
) -> Callable[[PyTree, PyTree], Explanation]:
    """Build a function that shows how `value_and_moments` computes the moments of every parameter.

    Args:
      loss_fn: as in `value_and_moments`.
      has_aux: as in `value_and_moments`.
      **keywords: the other options of `value_and_moments`.

    Returns:
      `explain(params, batch) -> Explanation`. It computes nothing and reads only shapes: tracers work too.

    >>> import jax.numpy as jnp
    >>> loss = lambda params, x: jnp.mean((x @ params["w"] + params["b"]) ** 2)
    >>> print(explain_moments(loss)({"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jnp.ones((4, 3))))
    leaf   shape  rule   positions  squares of  bytes  fallback
    -----  -----  -----  ---------  ----------  -----  --------
    ['b']  2      vmap   1          4           32
    ['w']  3x2    dense  1          4           80
    4 samples by sinks, 4 at a time
    """
    options = Options(loss_fn, has_aux, **keywords)

    def explain(params, batch):
        found = []

        def trace(params, batch):
            problem = make_problem(options, params, batch)
            method = choose_method(problem)
            leaves = jax.tree_util.tree_leaves_with_path(problem.params)
            nodes = [None] * len(leaves) if method.search is None else method.search.nodes
            name = options.method if method.search is None else "sinks"
            rows = [
                _row(jax.tree_util.keystr(path), leaf, node, method.chunk, problem.groups, name)
                for (path, leaf), node in zip(leaves, nodes, strict=True)
            ]
            found.append(Explanation(tuple(rows), problem.parts, method.chunk, name))
            return None, (params, params)

        jax.eval_shape(functools.partial(_jax_compat.with_automatic_samples, trace), params, batch)
        return found[-1]

    return explain


def _row(name: str, leaf: jax.Array, node: Node | None, chunk: int, groups: int | None, method: str) -> Row:
    """The row of a parameter; node: None under the methods "vmap" and "scan"."""
    if node is None:
        return Row(name, leaf.shape, method, 1, chunk, chunk * leaf.size * leaf.dtype.itemsize, method == "vmap")
    is_matrix = sum(size > 1 for size in leaf.shape) > 1
    missing = isinstance(node, PerSample) and is_matrix and node.made_by not in COTANGENTS
    size = chunk * sum(aval(key).size * aval(key).dtype.itemsize for key in node.operands)
    squares = min(groups or chunk, chunk) if node.is_loop else chunk
    return Row(name, leaf.shape, node.rule, node.positions, squares, size, missing)
