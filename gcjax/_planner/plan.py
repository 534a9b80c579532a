"""The planner: what a training step takes with every method on a given network.

**Source.** The cost model of Tsuzuku, Imachi, Akiba, "Variance-based Gradient Compression for Efficient Distributed
Deep Learning" (arXiv 1802.06058), for rings, extended by latencies, by other algorithms (`_network`), by two levels of
network and by the cost of compressing and decoding.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from gcjax._comm.simulated import Transfer, arriving_bytes, model_of, ring_bytes, transfers_of
from gcjax._planner.costs import Cost, Method, known_costs, measure, standard_methods
from gcjax._planner.network import Setting, as_count, as_link, as_seconds, rate_text, seconds_text
from gcjax._validation import check_integer, check_number

INNER_LATENCY = 5e-6
WORTH_IT = 0.03  # a smaller saving is not worth a compressor
MUCH = 10e9  # bytes: a worker that gathers more may have no room for them
_SLOWEST, _FASTEST = 1e3, 1e15  # bits per second, between which the break-even is looked for

DENSE = "dense float32"


class Row(NamedTuple):
    """One method.

    transport: the collectives that carry its bytes.  wire_bytes: what a host sends, and receives, in a step over the
    link.  arriving_bytes: what every worker gets into its memory by it.  compute, wire, step: seconds of compressing
    and decoding, of the exchange, of the whole step.  speedup: time of a dense float32 step / that of this one.
    break_even: bits per second of the link, above which the dense step is quicker; 0 if it always is, inf if it never
    is.  messages, squares: what goes into the model.
    """

    method: str
    transport: str
    wire_bytes: float
    arriving_bytes: int
    compute: float
    wire: float
    step: float
    speedup: float
    break_even: float
    messages: tuple[Transfer, ...]
    squares: bool


class Plan(NamedTuple):
    """rows: one for each method, the quickest first.  dense: the float32 one.  best: the quickest of the others.

    half: seconds of a step with a plain float16 all-reduce instead, outside of gcjax.  setting: what was asked for.
    `str` of it is a table and a sentence of advice.
    """

    rows: tuple[Row, ...]
    dense: Row
    best: Row
    half: float
    setting: Setting

    def at(self, link) -> "Plan":
        """The same for another link between the hosts, such as "10Gbit" (of the same latency) or a `Link`."""
        parts = [(row.method, row.messages, row.compute, row.squares) for row in self.rows]
        return _timed(parts, self.setting._replace(link=as_link("link", link, self.setting.link.latency)))

    @property
    def advice(self) -> str:
        best, dense = self.best, self.dense
        saved = 1 - best.step / dense.step
        if saved < WORTH_IT:
            saves = f"saves {100 * saved:.1f} % of the step" if saved > 0 else "is slower than dense float32"
            return f"Do not compress: the best, {best.method}, {saves}."
        half = f"a plain float16 all-reduce {seconds_text(self.half)}"
        times = f"{best.method} takes {seconds_text(best.step)} a step, dense float32 {seconds_text(dense.step)}"
        if best.step > (1 - WORTH_IT) * self.half:
            return f"A float16 all-reduce will do: {times}, {half}."
        return (
            f"{times}, {best.speedup:.1f} times as long, {half}. What a method does to the accuracy, and so to the "
            "number of steps, is outside this model."
        )

    def __str__(self) -> str:
        setting = self.setting
        hosts = setting.workers // setting.inner_workers
        inside = f" in {hosts} hosts of {setting.inner_workers}" if setting.inner_workers > 1 else ""
        head = (
            f"{setting.parameters:,} parameters, {setting.workers:,} workers{inside}, "
            f"{rate_text(setting.link.bits_per_second)}, step without exchange {seconds_text(setting.step_time)}"
        )
        titles = ("method", "transport", "wire MB", "compute ms", "wire ms", "step ms", "speed-up", "pays below")
        cells = [titles, *(_cells(row, self.dense) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = [
            "  ".join(c.ljust(w) if i < 2 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in cells
        ]
        notes = (
            [f"*: every worker gathers more than {MUCH / 1e9:.0f} GB."] if any(map(_gathers_much, self.rows)) else []
        )
        return "\n".join([head, "", *(line.rstrip() for line in lines), *notes, "", self.advice])


def plan(
    params_or_size,
    workers: int,
    link,
    step_time,
    *,
    density: float = 0.01,
    latency=50e-6,
    inner_workers: int = 1,
    inner_link=None,
    methods: Mapping[str, Method] | Sequence[str] | None = None,
    costs: Mapping[str, Cost] | None = None,
    progress=None,
) -> Plan:
    """Predicts the time of a training step with every method, to see which one pays, if any.

    The messages are read from the methods themselves, traced for so many workers. Nothing overlaps: forward and
    backward pass and optimiser (`step_time`), compressing and decoding, and the messages follow each other, as they do
    in gcjax. Compressing and decoding cost what they did on this device: if the costs of a method are not known yet,
    this calls `gcjax.measure_costs`, which takes a minute or two for all of them. All workers are taken to be equally
    fast and payloads to be full. What a method does to the accuracy is outside the model.

    Args:
      params_or_size: the parameters, a pytree of arrays or `jax.ShapeDtypeStruct`s; or their number, such as 25_600_000
        or "25.6M", which stands for matrices of 1000 x 1000.
      workers: number of data-parallel workers.
      link: each worker's link, or each host's with `inner_workers`: "1Gbit", "100Mbit", "50GB/s", a number of bits per
        second, or a `gcjax.Link`.
      step_time: seconds of a step on one worker without any exchange, or "300ms".
      density: share of the entries that sparse methods send, in (0, 1].
      latency: seconds of a message without content, or "50us"; over TCP 20 to 500 microseconds.
      inner_workers: workers on each host, over whose `inner_link` the mean is taken first (`inner_axis_name`); they
        share the work of one over the link between the hosts.
      inner_link: as `link`, with a latency of 5 microseconds.
      methods: names of those to compare ("variance", "top_k (reduce_scatter)", "power_sgd rank 2" as in the table, but
        without densities), None for all; or others by name, each a `gcjax.Method(make)`, where make(parameters) gives a
        transform made without axis names. Of a ladder of capacities the largest counts.
      costs: by the method's name, without its density, a `gcjax.Cost`, as `gcjax.measure_costs` returns; None for those
        of this device.
      progress: as for `gcjax.measure_costs`, should that be needed.

    Raises:
      ValueError: for values out of range or not understood, inner_workers that do not divide workers, unknown methods,
        a file of costs that is damaged.

    >>> import gcjax
    >>> costs = {"dense float32": gcjax.Cost(0, 1e-9, 0), "top_k": gcjax.Cost(0, 2e-9, 1e-9)}
    >>> found = gcjax.plan("25.6M", 16, "1Gbit", 0.3, methods=["top_k"], costs=costs)
    >>> print(found.best.method, round(found.best.speedup, 1))
    top_k 1/100 3.0
    """
    check_integer("workers", workers, 1)
    check_integer("inner_workers", inner_workers, 1)
    check_number("density", density, 0.0, 1.0)
    if workers % inner_workers:
        raise ValueError(f"inner_workers must divide workers, got {inner_workers} and {workers}")
    if (inner_workers > 1) != (inner_link is not None):
        raise ValueError(f"inner_workers and inner_link go together, got {inner_workers} and {inner_link!r}")
    params = _as_params(params_or_size)
    setting = Setting(
        parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(params)),
        workers=workers,
        link=as_link("link", link, as_seconds("latency", latency)),
        step_time=as_seconds("step_time", step_time),
        inner_workers=inner_workers,
        inner_link=None if inner_link is None else as_link("inner_link", inner_link, INNER_LATENCY),
    )
    standard = standard_methods(density)
    methods = _chosen(methods, standard)
    if costs is None:
        costs = known_costs([name for name in methods if name in standard], progress)
        costs |= {name: measure(method) for name, method in methods.items() if name not in standard}
    if missing := set(methods) - set(costs):
        raise ValueError(f"costs has none for {', '.join(sorted(missing))}; it has {', '.join(sorted(costs))}")
    hosts = workers // inner_workers
    parts = []
    for name, method in methods.items():
        messages = transfers_of(method.make(setting.parameters), params, hosts, method.squares)
        compute = Cost(*costs[name]).seconds(setting.parameters, messages, hosts)
        parts.append((_with_density(name, density) if method.sparse else name, messages, compute, method.squares))
    return _timed(parts, setting)


def _timed(parts, setting: Setting) -> Plan:
    """A plan from (method, messages, compute seconds, squares) each."""
    hosts = setting.workers // setting.inner_workers
    of = {method: (messages, compute, squares) for method, messages, compute, squares in parts}

    def step(messages, compute, squares, link=setting.link):
        return setting.step_time + compute + setting._replace(link=link).wire_seconds(messages, squares)

    def pays(method, rate) -> bool:
        link = setting.link._replace(bits_per_second=rate)
        return step(*of[method], link) < step(*of[DENSE], link)

    def break_even(method) -> float:
        if not pays(method, _SLOWEST):
            return 0.0
        if pays(method, _FASTEST):
            return math.inf
        low, high = _SLOWEST, _FASTEST
        while high > 1.0001 * low:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if pays(method, middle) else (low, middle)
        return low

    rows = [
        Row(
            method,
            transport=_transport(messages, hosts),
            wire_bytes=sum(ring_bytes(message, hosts) for message in messages),
            arriving_bytes=sum(arriving_bytes(message, hosts) for message in messages),
            compute=compute,
            wire=setting.wire_seconds(messages, squares),
            step=step(messages, compute, squares),
            speedup=step(*of[DENSE]) / step(messages, compute, squares),
            break_even=break_even(method),
            messages=messages,
            squares=squares,
        )
        for method, (messages, compute, squares) in of.items()
    ]
    rows.sort(key=lambda row: row.step)
    dense = next(row for row in rows if row.method == DENSE)
    best = next((row for row in rows if row is not dense), dense)
    halved = tuple(m._replace(bytes=m.bytes // 2) for m in dense.messages)
    return Plan(tuple(rows), dense, best, step(halved, dense.compute, False), setting)


def _chosen(methods, standard) -> dict[str, Method]:
    """The methods to compare, the dense mean first."""
    if methods is None:
        return standard
    if not isinstance(methods, Mapping):
        if unknown := set(methods) - set(standard):
            raise ValueError(f"no method {', '.join(sorted(unknown))}; there are {', '.join(standard)}")
        methods = {name: standard[name] for name in methods}
    return {DENSE: standard[DENSE]} | dict(methods)


def _as_params(params_or_size):
    if isinstance(params_or_size, (str, int, float)):
        return model_of(as_count("params", params_or_size))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params_or_size)


def _with_density(name: str, density: float) -> str:
    """ "top_k (reduce_scatter)" -> "top_k 1/100 (reduce_scatter)"."""
    whole = round(1 / density)
    share = f"1/{whole}" if math.isclose(1 / density, whole, rel_tol=1e-9) else f"{density:g}"
    method, bracket, rest = name.partition(" (")
    return f"{method} {share}{bracket}{rest}"


def _transport(messages: tuple[Transfer, ...], hosts: int) -> str:
    """The collectives, but for those that carry next to nothing."""
    total = sum(message.bytes for message in messages)
    kinds = [message.kind for message in messages if message.bytes > total / 1e3]
    return " + ".join(dict.fromkeys(kinds)) if hosts > 1 else "none"


def _gathers_much(row: Row) -> bool:
    return row.arriving_bytes > MUCH


def _cells(row: Row, dense: Row) -> tuple[str, ...]:
    return (
        row.method,
        row.transport + "*" * _gathers_much(row),
        f"{row.wire_bytes / 1e6:,.3g}" if row.wire_bytes < 1e9 else f"{row.wire_bytes / 1e6:,.0f}",
        f"{1e3 * row.compute:,.1f}",
        f"{1e3 * row.wire:,.1f}",
        f"{1e3 * row.step:,.1f}",
        f"{row.speedup:.2f}",
        "" if row is dense else rate_text(row.break_even),
    )
