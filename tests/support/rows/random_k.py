"""random_k_compress: its rows, the oracle and the recommended chain."""

import jax
import numpy as np
import optax
from oracle import F, hash_bits

import gcjax
from rows import COLUMNS, POSITIONS, Row, seed_words

SEED = 5


def drawn_entries(words, density, block, size):
    """Numbers of the entries that all workers send, and one over the share that they are."""
    blocks = -(-size // block)
    count = max(1, int(density * blocks))
    first, second = (int(word) for word in hash_bits(words, [count, count + 1]))
    rotation = (first * 2**32 + second) % blocks
    entries, begin = [], 0
    for slot, bits in enumerate(hash_bits(words, range(count))):
        length = blocks // count + (slot < blocks % count)
        number = (begin + int(bits) % length + rotation) % blocks
        entries += range(number * block, (number + 1) * block)
        begin += length
    assert begin == blocks
    return entries, blocks / count


class RandomKOracle:
    def __init__(self, workers, sizes, density, block, feedback):
        self.settings, self.feedback, self.sizes = (density, block), feedback, sizes
        position, columns = np.concatenate(POSITIONS), sum(COLUMNS)
        self.numbers = position // 128 * columns + position % 128  # row by row, without the unused columns
        self.size = 32 * columns
        self.residual = np.zeros((workers, len(position)), F)
        self.steps = 0

    def step(self, gradients, squares):
        del squares
        entries, rarity = drawn_entries(seed_words(jax.random.key(SEED), self.steps), *self.settings, self.size)
        here = np.isin(self.numbers, entries)
        a = np.stack([np.concatenate(leaves) for leaves in gradients])
        if self.feedback:
            a, rarity = a + self.residual, 1.0
            self.residual = np.where(here, F(0), a)
        self.steps += 1
        mean = np.where(here, np.mean(a * F(rarity), axis=0), 0).astype(F)
        return np.split(mean, np.cumsum(self.sizes)[:-1]), [(len(entries), len(entries), 0, 0)] * len(gradients)


def row(name, density, block=1, feedback=True, rare=False):
    def make(axis_name=None, **more):
        key = jax.random.key(SEED)
        return gcjax.contrib.random_k_compress(
            density, key=key, block=block, feedback=feedback, axis_name=axis_name, **more
        )

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
        rare=rare,
    )


ROWS = [
    row("entries", 0.1),
    row("blocks", 0.3, block=16, rare=True),
    row("unbiased", 0.1, feedback=False, rare=True),
]


def chain(axis_name, learning_rate):
    key = jax.random.key(SEED)
    return optax.chain(gcjax.contrib.random_k_compress(0.25, key=key, axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"random_k_compress": chain}
