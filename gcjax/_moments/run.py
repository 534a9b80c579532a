"""Run the backward pass of one sample, only as far as its value and the sinks' operands need it."""

from typing import Any, NamedTuple

import jax

from gcjax import _jax_compat
from gcjax._moments.rules.combine import Paired, Stacked


class LiveScan(NamedTuple):
    """What is left of a scan equation: positions of its kept carries and outputs, and what the body shall yield.

    Attributes:
        carries: kept carries, by position.
        outputs: kept outputs, by position among all results of the scan.
        extras: keys `Stacked` or `Paired` of this scan.
        inputs: the scan's operands that are still read.
        body: live equations of the body.
    """

    carries: list
    outputs: list
    extras: list
    inputs: list
    body: list


def run(live_eqns, env, token):
    """Evaluate equations; returns a reader of variables, literals and keys."""

    def read(key):
        return key.val if _jax_compat.is_literal(key) else env[key]

    for eqn, scan in live_eqns:
        if scan is None:
            env.update(zip(eqn.outvars, _jax_compat.bind(eqn, [read(atom) for atom in eqn.invars]), strict=True))
        else:
            env.update(_run_scan(eqn, scan, read, token))
    return read


def live(jaxpr, keys):
    """The equations needed for `keys`, in order, each with its `LiveScan` or None; and all variables needed."""
    needed = {key for key in keys if not _jax_compat.is_literal(key)}
    kept: list[tuple[Any, LiveScan | None]] = []
    for eqn in reversed(jaxpr.eqns):
        is_forced = _jax_compat.has_side_effects(eqn)
        if eqn.primitive.name == "scan":
            wanted = [i for i, v in enumerate(eqn.outvars) if is_forced or v in needed]
            extras = [key for key in needed if isinstance(key, Stacked | Paired) and key.scan is eqn]
            if wanted or extras:
                scan = _live_scan(eqn, wanted, extras)
                kept.append((eqn, scan))
                needed.update(scan.inputs)
        elif is_forced or any(v in needed for v in eqn.outvars):
            kept.append((eqn, None))
            needed.update(atom for atom in eqn.invars if not _jax_compat.is_literal(atom))
    return kept[::-1], needed


def _live_scan(eqn, wanted, extras):
    body, first, count = eqn.params["jaxpr"].jaxpr, eqn.params["num_consts"], eqn.params["num_carry"]
    outputs = [i for i in wanted if i >= count]
    carries = {i for i in wanted if i < count}
    inner = [key for extra in extras for key in _inner_keys(extra)]
    while True:
        eqns, needed = live(body, [body.outvars[i] for i in [*carries, *outputs]] + inner)
        fed = {i for i in range(count) if body.invars[first + i] in needed}
        if fed <= carries:
            break
        carries |= fed
    inputs = [
        outer
        for i, (outer, inside) in enumerate(zip(eqn.invars, body.invars, strict=True))
        if inside in needed or i - first in carries
    ]
    return LiveScan(sorted(carries), outputs, extras, [v for v in inputs if not _jax_compat.is_literal(v)], eqns)


def _inner_keys(extra):
    return [extra.key] if isinstance(extra, Stacked) else list(extra.node.needs)


def _run_scan(eqn, scan, read, token):
    closed, first, count = eqn.params["jaxpr"], eqn.params["num_consts"], eqn.params["num_carry"]
    body = closed.jaxpr
    inputs = set(scan.inputs)

    def available(atom):
        return _jax_compat.is_literal(atom) or atom in inputs

    consts = {v: read(a) for v, a in zip(body.invars[:first], eqn.invars[:first], strict=True) if available(a)}
    consts.update(zip(body.constvars, closed.consts, strict=True))
    last = first + count
    xs = {v: read(a) for v, a in zip(body.invars[last:], eqn.invars[last:], strict=True) if available(a)}
    names = list(xs)

    def step(carry, x):
        env = {**consts, **dict(zip(names, x, strict=True))}
        env.update({body.invars[first + i]: c for i, c in zip(scan.carries, carry, strict=True)})
        inside = run(scan.body, env, token)
        extras = [inside(e.key) if isinstance(e, Stacked) else e.node.pair(inside, token) for e in scan.extras]
        new_carry = [inside(body.outvars[i]) for i in scan.carries]
        return new_carry, ([inside(body.outvars[i]) for i in scan.outputs], extras)

    init = [read(eqn.invars[first + i]) for i in scan.carries]
    keywords = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, (outputs, extras) = jax.lax.scan(step, init, list(xs.values()), **keywords)
    results = dict(zip([eqn.outvars[i] for i in scan.carries], carry, strict=True))
    results.update(zip([eqn.outvars[i] for i in scan.outputs], outputs, strict=True))
    return {**results, **dict(zip(scan.extras, extras, strict=True))}
