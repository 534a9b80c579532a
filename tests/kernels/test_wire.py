"""The layouts of a message's entries: by hand, against a reader in plain Python, and with damaged words."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compact import compact_words, entries
from hypothesis import given, settings
from hypothesis import strategies as st

from gcjax._sparse import compaction
from gcjax._sparse.capacities import in_groups, ladder
from gcjax._sparse.wire import Wire, entropy_bits

SEEDS = st.integers(0, 2**31)


def packed(places, size):
    """The mask words with these places set."""
    words = np.zeros(-(-size // 32), np.uint32)
    for place in places:
        words[place // 32] |= np.uint32(1 << place % 32)
    return words


@functools.partial(jax.jit, static_argnums=0)
def written(wire, words, total, codes, rung):
    return wire.write(words, total, lambda place: codes[place], rung)


@functools.partial(jax.jit, static_argnums=0)
def read(wire, body, count, rung):
    """For each place the number of entries read there, and the code of the last."""

    def visit(carry, slot, place, code, valid):
        at = jnp.where(valid, place, wire.places)
        return carry[0].at[at].add(1, mode="drop"), carry[1].at[at].set(code, mode="drop")

    nothing = jnp.zeros(wire.places, jnp.int32), jnp.zeros(wire.places, jnp.uint32)
    return wire.read(body, count, visit, nothing, rung)


def test_a_compact_message_by_hand():
    # 32 slots, 256 places: l = 2, as 32 * 3 + 64 = 160 bits are fewer than 32 * 2 + 128 and 32 * 4 + 32.
    wire = Wire("compact", 4, 256, (32,))
    assert wire.low_bits(32) == 2
    assert wire.words(32) == 3 + 2 + 4
    codes = np.zeros(256, np.uint32)
    codes[[5, 6, 255]] = 9, 3, 15
    body = written(wire, packed([5, 6, 255], 256), 3, codes, 0)
    by_hand = [
        1 << 1 | 1 << 2,  # 5 >> 2 is 1, in slot 0: bit 1; 6 >> 2 is 1, in slot 1: bit 2
        0,
        1 << 1,  # 255 >> 2 is 63, in slot 2: bit 65
        0b111,  # bits 0 of the codes 9, 3, 15
        0b110,
        0b100,
        0b101,
        0b101,  # bits 0 of the low bits 1, 2, 3
        0b110,
    ]
    assert body[:9].tolist() == by_hand


def test_words_by_hand():
    wire = Wire("word", 4, 1 << 28, (32,))
    assert wire.words(32) == 32
    codes = np.zeros(300, np.uint32)
    codes[[5, 299]] = 9, 3
    body = written(wire._replace(places=300), packed([5, 299], 300), 2, codes, 0)
    assert [hex(word) for word in body[:3].tolist()] == ["0x90000005", "0x3000012b", "0x0"]


LADDER = in_groups((64, 320, 416, 864))
WIRES = [
    Wire("compact", 4, 1000, LADDER),
    Wire("compact", 1, 40, (64,)),
    Wire("compact", 16, 20_000, LADDER),
    Wire("compact", 32, 20_000, in_groups((4096, 9000))),  # several chunks
    Wire("word", 4, 20_000, in_groups((4096, 9000))),
    Wire("word", 1, 1000, LADDER),
]


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.sampled_from(WIRES), st.data())
def test_messages_come_back(seed, wire, data):
    rng = np.random.default_rng(seed)
    rung = data.draw(st.integers(0, len(wire.capacities) - 1))
    slots = wire.capacities[rung]
    count = data.draw(st.integers(0, min(slots, wire.places)))
    chosen = np.sort(rng.choice(wire.places, count, replace=False))
    codes = rng.integers(0, 2**wire.code_bits, wire.places, dtype=np.uint32)
    body = np.array(written(wire, packed(chosen, wire.places), count, codes, rung))
    assert len(body) == wire.room
    length = wire.words(slots)
    if wire.name == "word":
        assert length == slots
    else:
        assert length == compact_words(slots, wire.places, wire.code_bits)
        expected = [(place, codes[place]) for place in chosen]
        assert entries(body, count, slots, wire.places, wire.code_bits, wire.capacities) == expected
    body[length:] = rng.integers(0, 2**32, len(body) - length, dtype=np.uint32)  # what lies behind is no part of it
    times, found = read(wire, body, np.uint32(count), rung)
    np.testing.assert_array_equal(np.flatnonzero(times), chosen)
    np.testing.assert_array_equal(np.asarray(found)[chosen], codes[chosen])


@settings(deadline=None, max_examples=30)
@given(SEEDS, st.sampled_from(WIRES), st.sampled_from([(1000, 4096), (2000, 9000)]))
def test_messages_are_the_same_in_chunks_of_any_size(seed, wire, sizes):
    wire, other = wire._replace(smallest_chunk=sizes), wire._replace(smallest_chunk=sizes[::-1])
    rng = np.random.default_rng(seed)
    rung = len(wire.capacities) - 1
    count = min(wire.capacities[rung], wire.places) - 1
    chosen = np.sort(rng.choice(wire.places, count, replace=False))
    codes = rng.integers(0, 2**wire.code_bits, wire.places, dtype=np.uint32)
    body, same = (written(w, packed(chosen, wire.places), count, codes, rung) for w in (wire, other))
    length = wire.words(wire.capacities[rung])
    np.testing.assert_array_equal(body[:length], same[:length])
    for sent in (body, same[:length]):
        times, found = read(other, sent, np.uint32(count), rung)
        np.testing.assert_array_equal(np.flatnonzero(times), chosen)
        np.testing.assert_array_equal(np.asarray(found)[chosen], codes[chosen])


@pytest.mark.parametrize(("platform", "chunk"), [("cpu", 4096), ("tpu", 131_072), ("cuda", 131_072)])
def test_chunks_suit_the_platform(platform, chunk):
    wire = Wire("compact", 4, 10_000_000, (200_000,))
    words = jax.ShapeDtypeStruct((-(-wire.places // 32),), np.uint32)
    traced = jax.jit(lambda words: wire.write(words, jnp.int32(3), lambda place: place * jnp.uint32(0), 0)).trace(words)
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    sizes = {n for n in (4096, 131_072) if f"tensor<{-(-n // wire.group) * wire.group}xi32>" in text}
    assert sizes == {chunk}


@functools.partial(jax.jit, static_argnums=0)
def places_read(wire, body, count):
    """Of the entries read: how many are out of bounds, and how many there are."""

    def visit(carry, slot, place, code, valid):
        inside = (place >= 0) & (place < wire.places)
        return carry[0] + jnp.sum(valid & ~inside), carry[1] + jnp.sum(valid)

    return wire.read(body, count, visit, (jnp.int32(0), jnp.int32(0)), len(wire.capacities) - 1)


@settings(deadline=None, max_examples=60)
@given(SEEDS, st.sampled_from(WIRES), st.integers(0, 2**32 - 1))
def test_damaged_messages_stay_within_the_update(seed, wire, count):
    rng = np.random.default_rng(seed)
    for body in (rng.integers(0, 2**32, wire.room, dtype=np.uint32), np.full(wire.room, 2**32 - 1, np.uint32)):
        outside, found = places_read(wire, body, np.uint32(count))
        assert outside == 0
        chunk, _ = wire.chunks
        assert found <= min(count, -(-wire.capacities[-1] // chunk) * chunk)


@functools.partial(jax.jit, static_argnums=(2, 3))
def next_set_bits(words, cursor, count, window):
    return compaction.next_set_bits(words, 700, cursor, count, window)


@settings(deadline=None, max_examples=40)
@given(
    SEEDS, st.sampled_from([0.0, 0.001, 0.05, 0.5, 1.0]), st.sampled_from([32, 96, 1000]), st.sampled_from([128, 384])
)
def test_set_bits_in_chunks(seed, density, count, window):
    mask = np.random.default_rng(seed).random(700 * 32) < density
    places = np.flatnonzero(mask)
    words = np.concatenate([packed(places, mask.size), np.full(window, 2**32 - 1, np.uint32)])
    cursor, found = compaction.START, []
    for _ in range(len(places) // count + 1):
        index, cursor = next_set_bits(words, cursor, count, window)
        found += index.tolist()
    np.testing.assert_array_equal(found[: len(places)], places)


def test_the_length_stays_close_to_the_entropy_bound():
    for one_in in (4, 16, 64, 100, 1000, 4096, 10_000):
        places = 10_000_000
        slots = places // one_in // 32 * 32
        bound = float(entropy_bits(places, jnp.int32(slots), 4))
        assert 1 < 32 * Wire("compact", 4, places, (slots,)).words(slots) / bound < 1.12


def test_the_entropy_bound_of_a_few():
    exact = np.log2(np.prod(np.arange(991, 1001) / np.arange(1, 11), dtype=np.float64))  # 1000 choose 10
    assert float(entropy_bits(1000, jnp.int32(10), 4)) == pytest.approx(exact + 40, rel=0.03)
    assert float(entropy_bits(1000, jnp.int32(0), 4)) == 0
    assert float(entropy_bits(1000, jnp.int32(1000), 4)) == 4000


@pytest.mark.parametrize(
    ("wanted", "slots"),
    [
        ((1, 32, 33), (32, 64)),
        ((300, 8192), (320, 8192)),
        ((600, 32769), (640, 32832)),  # of 300 and more lanes of 2, in groups of 64
        ((512, 5000), (512, 5056)),
        ((1 << 17, 1 << 21), (1 << 17, 1 << 21)),
        ((40_000,), (40_960,)),  # 128 lanes: groups of 4,096
    ],
)
def test_capacities_are_rounded_up_to_groups_of_32_in_up_to_128_lanes(wanted, slots):
    assert in_groups(wanted) == slots


def test_capacities_grow_by_the_square_root_of_two():
    sizes = ladder(100, 1000)
    assert sizes == [100, 141, 200, 283, 400, 566, 800, 1000]
    assert ladder(5, 5) == [5]
