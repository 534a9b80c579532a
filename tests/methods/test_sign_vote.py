"""sign_vote_compress: majorities of any number of workers. tests/laws has ties, words and the momentum of signum."""

import jax.numpy as jnp
import numpy as np
import pytest

from gcjax.contrib import sign_vote


@pytest.mark.parametrize("workers", [1, 2, 3, 8, 15, 16, 17, 33])  # more than 16 are added in a loop
def test_the_majority_is_taken_bit_by_bit(workers):
    votes = np.random.default_rng(workers).integers(0, 2**32, (workers, 50), dtype=np.uint32)
    majority = np.asarray(sign_vote._majority(jnp.asarray(votes)))
    for column in range(50):
        for bit in range(32):
            count = sum(int(word) >> bit & 1 for word in votes[:, column])
            assert int(majority[column]) >> bit & 1 == (count > workers / 2)
