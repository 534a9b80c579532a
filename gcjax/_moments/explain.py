"""`explain_moments`: which rule each parameter's moments are made by, and what it holds in memory."""

from typing import NamedTuple

import jax

from gcjax._moments import per_sample, sinks
from gcjax._moments.problem import make_options, make_problem
from gcjax._moments.rules.combine import Stacked
from gcjax._moments.rules.entrywise import Leaf
from gcjax._moments.sink_search import key_size

# Where a vector's gradient is naturally cut: a sum of cotangents, or entries of a cotangent itself.
NATURAL = {"reduce_sum", "mul", "add", "add_any", "sub", "neg", "div", "select_n", "broadcast_in_dim", "input"}
HEADER = ("leaf", "shape", "rule", "positions", "bytes", "fallback")


class Row(NamedTuple):
    """How the moments of one parameter are made.

    Attributes:
        leaf: path of the parameter.
        shape: its shape.
        rule: name of the sink, with "scanned", "over time", "tied", "mixed" or "joined" where it is one of several;
            "leaf" for a gradient that vmap stacks as it is.
        positions: contracted entries per sample (sequence positions, pixels); 1 is an outer product.
        bytes: what the rule reads for the whole batch, or for one chunk of it: operands that the plain backward pass
            holds too, or for a leaf the stacked gradients.
        fallback: whether a rule was missing, so that an array of batch x parameter is made.
    """

    leaf: str
    shape: tuple
    rule: str
    positions: int
    bytes: int
    fallback: bool


class Explanation(NamedTuple):
    """What `value_and_moments` would do; its `str` is a table.

    Attributes:
        rows: one `Row` for every parameter.
        groups: samples (or microbatches) in the batch.
        chunk: how many of them are processed at a time.
        method: the method that would run, "sinks" or "vmap".
    """

    rows: tuple
    groups: int
    chunk: int
    method: str

    def __str__(self):
        table = [HEADER]
        for row in self.rows:
            shape = "x".join(map(str, row.shape)) or "scalar"
            table.append(
                (row.leaf, shape, row.rule, str(row.positions), f"{row.bytes:,}", "yes" if row.fallback else "")
            )
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        total = f"{self.groups} samples by {self.method}, {self.chunk} at a time"
        return "\n".join([*lines, total])


def explain_moments(loss_fn, has_aux=False, **keywords):
    """Build a function that says how `value_and_moments` makes the moments of every parameter.

    Args:
        loss_fn, has_aux: as in `value_and_moments`, and so are all keywords.

    Returns:
        `explain(params, batch) -> Explanation`. Nothing is computed: arrays or tracers do, and only shapes are read.

    Example:
        >>> import jax.numpy as jnp
        >>> loss = lambda params, x: jnp.mean((x @ params["w"] + params["b"]) ** 2)
        >>> print(explain_moments(loss)({"w": jnp.ones((3, 2)), "b": jnp.ones(2)}, jnp.ones((4, 3))))
        leaf   shape  rule   positions  bytes  fallback
        -----  -----  -----  ---------  -----  --------
        ['b']  2      leaf   1          32
        ['w']  3x2    dense  1          80
        4 samples by sinks, 4 at a time
    """
    options = make_options(loss_fn, has_aux, **keywords)

    def explain(params, batch):
        problem = make_problem(options, params, batch)
        paths = [
            (jax.tree_util.keystr(path), leaf.shape)
            for path, leaf in jax.tree_util.tree_leaves_with_path(problem.params)
        ]
        if options.method in ("vmap", "scan"):
            chunk = 1 if options.method == "scan" else per_sample.chunk_for(problem, per_sample.gradient_bytes(problem))
            leaves = jax.tree.leaves(problem.params)
            sizes = [chunk * leaf.size * leaf.dtype.itemsize for leaf in leaves]
            rows = [Row(name, shape, "leaf", 1, size, True) for (name, shape), size in zip(paths, sizes, strict=True)]
            return Explanation(tuple(rows), problem.groups, chunk, "vmap")
        plan = sinks.make_plan(problem)
        chunk = per_sample.chunk_for(problem, plan.leaf_bytes) if options.method == "auto" else problem.groups
        rows = [_row(name, shape, node, chunk) for (name, shape), node in zip(paths, plan.nodes, strict=True)]
        return Explanation(tuple(rows), problem.groups, chunk, "sinks")

    return explain


def _row(name, shape, node, chunk):
    is_matrix = sum(size > 1 for size in shape) > 1
    missing = isinstance(node, Leaf) and is_matrix and node.made_by not in NATURAL
    return Row(name, shape, node.rule, node.positions, chunk * sum(map(_bytes, node.operands)), missing)


def _bytes(key):
    return key_size(key) * (key.key if isinstance(key, Stacked) else key).aval.dtype.itemsize
