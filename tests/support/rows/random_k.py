"""Rows and oracle of random_k_compress."""

import jax
import numpy as np
import optax
from oracle import F, hash_bits

import gcjax
from rows import OFFSETS, Row, seed_words

SEED = 5


def drawn_entries(words, density, block, size):
    """Entries of the flat bucket that all workers send, and how many times rarer than all they are."""
    blocks = -(-size // block)
    count = max(1, int(density * blocks))
    first, second = (int(word) for word in hash_bits(words, [count, count + 1]))
    turn = (first * 2**32 + second) % blocks
    entries, begin = [], 0
    for slot, bits in enumerate(hash_bits(words, range(count))):
        length = blocks // count + (slot < blocks % count)
        number = (begin + int(bits) % length + turn) % blocks
        entries += range(number * block, (number + 1) * block)
        begin += length
    assert begin == blocks
    return entries, blocks / count


class RandomKOracle:
    def __init__(self, workers, sizes, density, block, feedback):
        self.settings, self.feedback, self.sizes = (density, block), feedback, sizes
        self.places = np.concatenate([offset + np.arange(n) for offset, n in zip(OFFSETS, sizes, strict=True)])
        self.size = OFFSETS[-1] + sizes[-1]
        self.residual = np.zeros((workers, len(self.places)), F)
        self.steps = 0

    def step(self, gradients, squares):
        del squares
        entries, rarity = drawn_entries(seed_words(jax.random.key(SEED), self.steps), *self.settings, self.size)
        here = np.isin(self.places, entries)
        a = np.stack([np.concatenate(leaves) for leaves in gradients])
        if self.feedback:
            a, rarity = a + self.residual, 1.0
            self.residual = np.where(here, F(0), a)
        self.steps += 1
        mean = np.where(here, np.mean(a * F(rarity), axis=0), 0).astype(F)
        return np.split(mean, np.cumsum(self.sizes)[:-1]), [(len(entries), len(entries), 0, 0)] * len(gradients)


def random_k(name, density, block=1, feedback=True):
    def make(axis_name=None, **more):
        key = jax.random.key(SEED)
        return gcjax.random_k_compress(density, key=key, block=block, feedback=feedback, axis_name=axis_name, **more)

    def make_oracle(workers, sizes):
        return RandomKOracle(workers, sizes, density, block, feedback)

    return Row(
        f"random_k-{name}",
        "random_k_compress",
        make,
        make_oracle,
        conserves=feedback,
        rtol=1e-6,
        wire=frozenset({"s32", "f32"}),
        infinite_at=float("inf") if feedback else 1e37,
    )


ROWS = [
    random_k("entries", 0.1),
    random_k("blocks", 0.3, block=16),
    random_k("unbiased", 0.1, feedback=False),
]


def chain(axis_name, learning_rate):
    key = jax.random.key(SEED)
    return optax.chain(gcjax.random_k_compress(0.25, key=key, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"random_k_compress": chain}
