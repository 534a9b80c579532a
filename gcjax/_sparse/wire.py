"""How the entries of a message are laid out in words: the compact form, and the paper's words.

**Compact.** Positions travel in Elias and Fano's code. Of K slots among n places, the entry in slot s has its place i
cut into the l low bits and the rest. The rest is the set bit number s of a vector of K + (n - 1 >> l) + 1 bits, at
(i >> l) + s. The low bits follow in groups of slots with the code of the value: for each group first the bits 0 of
all its codes, then the bits 1, and so on, then the low bits in the same way. A group has 32 rows of `lanes` slots, and
a word holds a column of it. l is the number for which the message is shortest. So the length depends on K and n alone.

Sources: Peter Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", J. ACM 21(2), 1974;
Robert Fano, "On the Number of Bits Required to Implement an Associative Memory", MIT, 1971; in the form of Sebastiano
Vigna, "Quasi-succinct Indices", WSDM 2013, arXiv 1206.4300.

**Words.** One word for each slot: the value's code in the highest bits, the place below it.

Entries are written and read in chunks of one size. So one program serves any number of slots, and only the collective
has to know it when the program is compiled.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax.numpy as jnp
from jax import lax

from gcjax._jax_compat import vary_like
from gcjax._kernels.bits import LANES, WORD, pack_masks
from gcjax._sparse.compaction import START, Cursor, next_set_bits
from gcjax._types import Array, ArrayLike
from gcjax._validation import check_choice

WIRES = ("compact", "word")
CHUNKS = 64  # of the largest message, at most
SMALLEST_CHUNK = 4096  # of a message with as many slots, on CPUs: it stays in their cache
# Each operation takes an accelerator some microseconds, however few the slots. On a TPU v5e, a chunk as above is
# estimated at 46,000 cycles and one 20 times as large at 81,000.
SMALLEST_ACCELERATOR_CHUNK = 131072

CodeAt = Callable[[Array], Array]
T = TypeVar("T")
Visit = Callable[[T, Array, Array, Array, Array], T]


def check_wire(wire: str, code_bits: int) -> None:
    """Raise ValueError unless `wire` is one of `WIRES` that suits values of so many bits.

    >>> import gcjax.extend as gx
    >>> gx.check_wire("zip", code_bits=4)
    Traceback (most recent call last):
    ValueError: wire must be one of 'compact', 'word', got 'zip'
    """
    check_choice("wire", wire, WIRES)
    if wire == "word" and code_bits > 4:
        raise ValueError(f"wire='word' has 4 bits for a value, of which {code_bits} are to be sent; use wire='compact'")


class Wire(NamedTuple):
    """The layout of a message's entries, for each of its capacities.

    Attributes:
      name: "compact" or "word".
      code_bits: bits of one value's code.
      places: entries have places 0 to places - 1.
      capacities: numbers of slots, ascending, multiples of `group`.
      smallest_chunk: slots that are written or read at once if there are as many, on CPUs and on accelerators. Messages
        are the same for any.
    """

    name: str
    code_bits: int
    places: int
    capacities: tuple[int, ...]
    smallest_chunk: tuple[int, int] = (SMALLEST_CHUNK, SMALLEST_ACCELERATOR_CHUNK)

    @property
    def lanes(self) -> int:
        """The more the better for vector units; as many as all capacities allow."""
        return math.gcd(LANES, math.gcd(*self.capacities) // WORD) if self.name == "compact" else 1

    @property
    def group(self) -> int:
        """Slots of a group."""
        return WORD * self.lanes

    @property
    def chunks(self) -> tuple[int, int]:
        """Slots that are written or read at once, on CPUs and on accelerators."""
        most = self.capacities[-1]
        wanted = [min(most, max(smallest, most // CHUNKS)) for smallest in self.smallest_chunk]
        on_cpu, on_others = (-(-slots // self.group) * self.group for slots in wanted)
        return on_cpu, on_others

    def low_bits(self, slots: int) -> int:
        """l of the compact form."""
        if self.name == "word":
            return 32 - self.code_bits
        return min(range(32), key=lambda low: self._position_bits(slots, low))

    def _position_bits(self, slots: int, low: int) -> int:
        return slots * (low + 1) + (self.places - 1 >> low) + 1

    def upper_words(self, slots: int) -> int:
        """Words of the bit vector in front."""
        return 0 if self.name == "word" else -(-(slots + (self.places - 1 >> self.low_bits(slots)) + 1) // 32)

    def words(self, slots: int) -> int:
        """Words of all entries."""
        return self.upper_words(slots) + slots // WORD * (self.low_bits(slots) + self.code_bits)

    def bits(self, count: Array) -> Array:
        """Bits of a message of just so many entries, without padding: float32."""
        count = count.astype(jnp.float32)
        if self.name == "word":
            return 32 * count
        lows = jnp.arange(32)
        positions = count * (lows + 1) + (self.places - 1 >> lows) + 1
        return jnp.where(count > 0, jnp.min(positions), 0) + self.code_bits * count

    @property
    def room(self) -> int:
        """Words of an array that holds any of the messages, and more."""
        return self._room(self.chunks[0])

    def _room(self, chunk: int) -> int:
        """Words of an array that holds any of the messages and what a last chunk writes or reads beyond."""
        beyond = chunk // WORD * (max(self._lows) + self.code_bits)
        return max(map(self.words, self.capacities)) + max(beyond, _window(chunk))

    @property
    def _lows(self) -> list[int]:
        return [self.low_bits(slots) for slots in self.capacities]

    def _upper_at(self, rung: ArrayLike) -> Array | int:
        return _at([self.upper_words(slots) for slots in self.capacities], rung)

    def write(self, words: Array, total: Array, code_at: CodeAt, rung: ArrayLike) -> Array:
        """The entries of a packed mask.

        Args:
          words: uint32[m], the mask; a place is 32 * word + bit.
          total: int32, set bits.
          code_at: code_at(places) -> the values' codes, uint32.
          rung: number of the capacity.

        Returns:
          uint32[room], from the start as many words as `words(capacity)` says.
        """
        return self._on_platform(lambda chunk: self._write(chunk, words, total, code_at, rung))

    def _write(self, chunk: int, words: Array, total: Array, code_at: CodeAt, rung: ArrayLike) -> Array:
        size, window = len(words), -(-min(chunk, len(words)) // LANES) * LANES
        padded = jnp.pad(words, (0, window))

        def write_chunk(number: Array | int, state: tuple[Cursor, Array]) -> tuple[Cursor, Array]:
            cursor, body = state
            place, cursor = next_set_bits(padded, size, cursor, chunk, window)
            slot = number * chunk + jnp.arange(chunk, dtype=jnp.int32)
            code = jnp.where(slot < total, code_at(place), 0)
            return cursor, self._put(body, number, slot, place, code, slot < total, rung)

        start = (Cursor(*(jnp.asarray(x, jnp.int32) for x in START)), jnp.zeros(self._room(chunk), jnp.uint32))
        return _of_length(self._in_chunks(chunk, write_chunk, vary_like(start, (words, total)), rung)[1], self.room)

    def read(self, body: Array, count: Array, visit: Visit[T], carry: T, rung: ArrayLike) -> T:
        """Call visit(carry, slot, place, code, valid) -> carry for chunk after chunk of a message.

        Whatever the words are, valid entries have places from 0 to places - 1.

        Args:
          body: uint32[room], a message as `write` returns it; anything behind it.
          count: uint32, entries in it, as the sender says.
          visit: gets int32[chunk] slots and places, uint32[chunk] codes, bool[chunk].
          carry: its first argument in the first call.
          rung: number of the capacity.
        """
        return self._on_platform(lambda chunk: self._read(chunk, body, count, visit, carry, rung))

    def _read(self, chunk: int, body: Array, count: Array, visit: Visit[T], carry: T, rung: ArrayLike) -> T:
        body = _of_length(body, max(self._room(chunk), len(body)))

        def read_chunk(number: Array | int, state: tuple[Cursor, T]) -> tuple[Cursor, T]:
            cursor, carry = state
            slot = number * chunk + jnp.arange(chunk, dtype=jnp.int32)
            cursor, place, code = self._get(body, number, cursor, slot, rung)
            valid = (slot.astype(jnp.uint32) < count) & (place >= 0) & (place < self.places)
            return cursor, visit(carry, slot, place, code, valid)

        start = vary_like(Cursor(*(jnp.asarray(x, jnp.int32) for x in START)), body)
        return self._in_chunks(chunk, read_chunk, (start, carry), rung)[1]

    def _on_platform(self, run: Callable[[int], T]) -> T:
        """run(slots of a chunk) as it suits the platform that the program is compiled for."""
        on_cpu, on_others = self.chunks
        if on_cpu == on_others:
            return run(on_cpu)
        return lax.platform_dependent(cpu=lambda: run(on_cpu), default=lambda: run(on_others))

    def _in_chunks(self, chunk: int, step: Callable[[Array | int, T], T], state: T, rung: ArrayLike) -> T:
        chunks = [-(-slots // chunk) for slots in self.capacities]
        if max(chunks) == 1:
            return step(0, state)
        return lax.fori_loop(0, _at(chunks, rung), step, state)

    def _put(
        self, body: Array, number: Array | int, slot: Array, place: Array, code: Array, valid: Array, rung: ArrayLike
    ) -> Array:
        """The message with one chunk written into it. A later chunk overwrites what is written beyond its end."""
        if self.name == "word":
            word = (code << (32 - self.code_bits)) | place.astype(jnp.uint32)
            return lax.dynamic_update_slice_in_dim(body, jnp.where(valid, word, 0), number * len(slot), 0)
        lows = self._lows
        low = _at(lows, rung)
        bit = (place >> low) + slot
        one = jnp.uint32(1) << (bit % 32).astype(jnp.uint32)
        body = body.at[jnp.where(valid, bit // 32, len(body))].add(one, mode="drop", indices_are_sorted=True)
        rest = jnp.where(valid, place & ((1 << low) - 1), 0).astype(jnp.uint32)
        planes = jnp.concatenate([self._planes(code, self.code_bits), self._planes(rest, max(lows))], axis=1)
        planes = planes.reshape(-1)
        if len(set(lows)) > 1:  # leave out the planes that this capacity has not
            target = jnp.arange(len(planes), dtype=jnp.int32)
            width = (self.code_bits + low) * self.lanes
            planes = planes[jnp.minimum(target + target // width * ((max(lows) - low) * self.lanes), len(planes) - 1)]
        return lax.dynamic_update_slice_in_dim(body, planes, self._begin(number, len(slot), low, rung), 0)

    def _get(
        self, body: Array, number: Array | int, cursor: Cursor, slot: Array, rung: ArrayLike
    ) -> tuple[Cursor, Array, Array]:
        """The places and codes of one chunk: the inverse of `_put`."""
        if self.name == "word":
            word = lax.dynamic_slice_in_dim(body, number * len(slot), len(slot))
            place = (word & ((1 << (32 - self.code_bits)) - 1)).astype(jnp.int32)
            return cursor, place, word >> (32 - self.code_bits)
        lows = self._lows
        low = _at(lows, rung)
        most = self.code_bits + max(lows)
        planes = lax.dynamic_slice_in_dim(body, self._begin(number, len(slot), low, rung), len(slot) // WORD * most)
        if len(set(lows)) > 1:
            target = jnp.arange(len(planes), dtype=jnp.int32)
            planes = planes[target - target // (most * self.lanes) * ((max(lows) - low) * self.lanes)]
        planes = planes.reshape(-1, most, self.lanes)
        code, rest = self._joined(planes[:, : self.code_bits]), self._joined(planes[:, self.code_bits :])
        bit, cursor = next_set_bits(body, self._upper_at(rung), cursor, len(slot), _window(len(slot)))
        rest = rest & ((jnp.uint32(1) << low) - 1)
        return cursor, ((bit - slot) << low) | rest.astype(jnp.int32), code

    def _begin(self, number: Array | int, chunk: int, low: Array | int, rung: ArrayLike) -> Array | int:
        """The first word of a chunk's low bits and codes."""
        return self._upper_at(rung) + number * (chunk // WORD) * (self.code_bits + low)

    def _planes(self, values: Array, bits: int) -> Array:
        """uint32[chunk] below 2**bits -> uint32[groups, bits, lanes]."""
        rows = values.reshape(-1, WORD, self.lanes)
        if not bits:
            return rows[:, :0]
        planes = pack_masks(*(rows >> b & 1 != 0 for b in range(bits)))
        return jnp.stack([plane.reshape(-1, self.lanes) for plane in planes], axis=1)

    def _joined(self, planes: Array) -> Array:
        """The inverse of `_planes`."""
        bit, row = (jnp.arange(n, dtype=jnp.uint32)[:, None] for n in (planes.shape[1], WORD))
        return jnp.sum((planes[:, :, None] >> row & 1) << bit[..., None], axis=1, dtype=jnp.uint32).reshape(-1)


def _of_length(words: Array, length: int) -> Array:
    """The words cut, or followed by zeros."""
    if len(words) >= length:
        return words[:length]
    return jnp.pad(words, (0, length - len(words)))


def _window(chunk: int) -> int:
    """Words of the bit vector to look at in a round: it has two to three bits for each entry."""
    return -(-chunk // 8 // LANES) * LANES


def _at(table: list[int], rung: ArrayLike) -> Array | int:
    """The entry of a table; a Python int where all are the same."""
    return table[0] if len(set(table)) == 1 else jnp.asarray(table, jnp.int32)[rung]


def entropy_bits(places: int, count: Array, code_bits: int) -> Array:
    """The least that `count` entries with such codes take, places any of which is as likely: float32.

    The logarithm of the number of ways to choose the places, by Stirling's formula.
    """
    k, n = count.astype(jnp.float32), float(places)
    p = jnp.clip(k / n, 1 / n, 1 - 1 / n)
    position = -(p * jnp.log2(p) + (1 - p) * jnp.log1p(-p) / math.log(2)) * n
    return jnp.where(k > 0, jnp.where(k < n, position, 0), 0) + code_bits * k
