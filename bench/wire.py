"""Bits of a sent entry beside the entropy bound, and what writing and reading compact messages takes beside words.

    python -m bench.wire

Lengths are those of `gcjax.variance_compress`'s messages with the default capacities, 4 bits a value: of a message that
fills its capacity, and the mean over numbers of entries between it and the capacity below, which need padding. Times
are of one worker's message of uniformly drawn entries: written, and read and added to a mean of zeros. Both layouts are
timed alternately in one process.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from bench import machine, provenance
from gcjax._kernels.bits import BLOCK, count_bits, pack_mask, position_of
from gcjax._sparse.capacities import capacities_for
from gcjax._sparse.value_codes import power_of_two_code
from gcjax._sparse.wire import WIRES, Wire, entropy_bits

SIZES = (92_074, 10_000_000)
DENSITIES = (4, 16, 64, 100, 1000, 10_000)  # one entry in this many is sent
TIMED = (10_000_000, (16, 100, 1000))
SCALE = 130  # biased exponent of the largest value
WARM_UP = 3


def main() -> None:
    parser = machine.Parser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="no times; writes no files")
    parser.add_argument("--repeats", type=int, default=21, help="timed calls (default 21)")
    args = parser.parse_args()
    lengths = [length_row(size, one_in) for size in SIZES for one_in in DENSITIES]
    record = provenance.provenance("wire") | {"lengths": lengths, "times": []}
    if not args.quick:
        size, densities = TIMED
        record |= {"times": [time_row(size, one_in, args.repeats) for one_in in densities], "repeats": args.repeats}
    text = report(record)
    print(text)
    if not args.quick:
        provenance.save(provenance.RESULTS, "wire", record, text)


def length_row(size: int, one_in: int) -> dict:
    """Bits of an entry at one density, as sent and at best."""
    count, wire = size // one_in, wire_of("compact", size)
    capacity = next(slots for slots in wire.capacities if slots >= count)
    below = max((slots for slots in wire.capacities if slots < count), default=None)
    counts = [count] if below is None else np.linspace(below + 1, capacity, 100)
    padded = [32 * wire.words(capacity) / k for k in counts]
    bound = float(entropy_bits(size, jnp.int32(count), 4)) / count
    exact = Wire("compact", 4, size, (-(-count // 32) * 32,))
    return {
        "size": size,
        "density": f"1/{one_in}",
        "bound": round(bound, 2),
        "exact": round(32 * exact.words(exact.capacities[0]) / count, 2),
        "exact_over_bound": round(32 * exact.words(exact.capacities[0]) / count / bound, 2),
        "padded": round(statistics.mean(padded), 2),
        "padded_over_bound": round(statistics.mean(padded) / bound, 2),
        "word": 32,
    }


def wire_of(name: str, size: int) -> Wire:
    places = -(-size // BLOCK) * BLOCK
    return Wire(name, 4, places, capacities_for(0.25, size))


def time_row(size: int, one_in: int, repeats: int) -> dict:
    """Milliseconds of both layouts."""
    blocks = -(-size // BLOCK)
    rng = np.random.default_rng(0)
    values = jnp.asarray(rng.standard_normal((blocks, BLOCK // 128, 128)), jnp.float32)
    words = jax.jit(pack_mask)(jnp.asarray(rng.random(values.shape) < 1 / one_in))
    count = int(jnp.sum(count_bits(words)))
    calls, times = {}, {}
    for name in WIRES:
        wire = wire_of(name, size)
        rung = jnp.int32(next(i for i, slots in enumerate(wire.capacities) if slots >= count))
        write, read = (jax.jit(functools.partial(function, wire)) for function in (written, mean_of))
        body = write(words, values, jnp.int32(count), rung)
        calls[name, "write"] = functools.partial(write, words, values, jnp.int32(count), rung)
        calls[name, "read"] = functools.partial(read, body, jnp.uint32(count), rung)
    calls["both", "zeros"] = functools.partial(jax.jit(lambda x: jnp.zeros(blocks * BLOCK) + 0 * x), jnp.float32(1))
    for turn in range(WARM_UP + repeats):
        for call, run in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(run())
            if turn >= WARM_UP:
                times.setdefault(call, []).append(1e3 * (time.perf_counter() - begin))
    medians = {f"{name}_{what}_ms": round(statistics.median(spent), 2) for (name, what), spent in times.items()}
    return {"size": size, "density": f"1/{one_in}", "load": machine.load(), **medians}


def written(wire: Wire, words: jax.Array, values: jax.Array, count: jax.Array, rung: jax.Array) -> jax.Array:
    code = power_of_two_code()

    def code_at(place):
        return code.encode(values.reshape(-1)[position_of(place)], jnp.uint32(SCALE), None, None)

    return wire.write(words, count, code_at, rung)


def mean_of(wire: Wire, body: jax.Array, count: jax.Array, rung: jax.Array) -> jax.Array:
    code = power_of_two_code()

    def add(mean, slot, place, codes, valid):
        at = jnp.where(valid, position_of(place), wire.places + slot)
        return mean.at[at].add(code.decode(codes, jnp.uint32(SCALE)), mode="drop", unique_indices=True)

    return wire.read(body, count, add, jnp.zeros(wire.places), rung)


def report(record: dict) -> str:
    """Markdown."""
    lines = [
        provenance.machine_line(record),
        provenance.versions_line(record),
        "Bits of a sent entry, with 4 bits for its value. Padded: the mean over numbers of entries with this capacity.",
        "",
        "| N | density | entropy bound | compact | / bound | padded | / bound | word |",
        "|---|---|---|---|---|---|---|---|",
    ]
    names = ("bound", "exact", "exact_over_bound", "padded", "padded_over_bound", "word")
    for row in record["lengths"]:
        lines.append(f"| {row['size']:,} | {row['density']} | " + " | ".join(str(row[name]) for name in names) + " |")
    if record["times"]:
        lines += [
            "",
            f"Milliseconds, medians of {record['repeats']}. Reading includes filling the mean with zeros.",
            "",
            "| N | density | write compact | write words | read compact | read words | zeros alone | load |",
            "|---|---|---|---|---|---|---|---|",
        ]
        names = ("compact_write_ms", "word_write_ms", "compact_read_ms", "word_read_ms", "both_zeros_ms", "load")
        for row in record["times"]:
            cells = " | ".join(str(row[name]) for name in names)
            lines.append(f"| {row['size']:,} | {row['density']} | {cells} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
