"""A reader of compact messages in plain Python, bit by bit."""

import math


def low_bits(slots, places):
    return min(range(32), key=lambda low: slots * (low + 1) + ((places - 1) >> low) + 1)


def compact_words(slots, places, code_bits):
    """Words of a message of so many slots among so many places."""
    low = low_bits(slots, places)
    return math.ceil((slots + ((places - 1) >> low) + 1) / 32) + slots // 32 * (low + code_bits)


def entries(words, count, slots, places, code_bits, capacities=None):
    """[(place, code)] of the first `count` entries. `capacities` are all of the message, (slots,) if None."""
    words = [int(word) for word in words]
    low = low_bits(slots, places)
    upper = math.ceil((slots + ((places - 1) >> low) + 1) / 32)
    bits = [at for at in range(32 * upper) if words[at // 32] >> at % 32 & 1]
    assert len(bits) == count
    lanes = math.gcd(128, *(capacity // 32 for capacity in capacities or (slots,)))
    found = []
    for slot, at in enumerate(bits):
        group, row, lane = slot // (32 * lanes), slot // lanes % 32, slot % lanes

        def field(first, width, group=group, row=row, lane=lane):
            planes = [words[upper + (group * (code_bits + low) + first + b) * lanes + lane] for b in range(width)]
            return sum((plane >> row & 1) << b for b, plane in enumerate(planes))

        found.append(((at - slot) << low | field(code_bits, low), field(0, code_bits)))
    return found
