"""The real model: a small transformer that learns to continue arithmetic sequences."""

from collections.abc import Callable

import numpy as np

WIDTH, DEPTH, HEADS, WORDS = 256, 4, 4, 512
SAMPLES, LENGTH = 48, 32  # of each host's batch


def setup(host: int) -> tuple[Callable, dict, np.ndarray]:
    """Loss function, parameters (the same on all hosts), and the host's batch."""
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import optax

    class Transformer(nn.Module):
        @nn.compact
        def __call__(self, tokens):
            x = nn.Embed(WORDS, WIDTH)(tokens)
            x = x + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
            mask = nn.make_causal_mask(tokens)
            for _ in range(DEPTH):
                x = x + nn.MultiHeadDotProductAttention(HEADS)(nn.LayerNorm()(x), mask=mask)
                x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
            return nn.Dense(WORDS)(nn.LayerNorm()(x))

    model = Transformer()

    def loss_fn(params, batch):
        logits = model.apply(params, batch[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch[:, 1:]).mean()

    params = model.init(jax.random.key(0), jnp.zeros((1, LENGTH), "int32"))
    return loss_fn, params, sequences(host)


def sequences(host: int) -> np.ndarray:
    """The batch of a host, int32[SAMPLES, LENGTH + 1]."""
    first, difference = np.random.default_rng(host).integers(0, WORDS, (2, SAMPLES, 1))
    return ((first + difference * np.arange(LENGTH + 1)) % WORDS).astype(np.int32)
