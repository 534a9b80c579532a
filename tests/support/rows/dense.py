"""dense_compress: its rows, the oracle and the recommended chain."""

import optax
from codec_oracle import CodecOracle
from oracle import F

import gcjax
from rows import Row


def row(dtype, transport="all_gather"):
    exact = dtype == "float32"
    options = {} if exact else {"transport": transport}

    def make(axis_name=None, **more):
        return gcjax.dense_compress(dtype, **options, axis_name=axis_name, **more)

    def code(leaves, places, words):
        del places, words
        return [x.astype(dtype).astype(F) for x in leaves]

    def make_oracle(workers, sizes):
        """Sums over three or more workers may round in another order, so float32 is compared with a tolerance."""
        return CodecOracle(workers, sizes, code, transport=transport, owners_keep=False)

    return Row(
        f"dense-{dtype}{'-owners' * (transport == 'two_phase')}",
        "dense_compress",
        make,
        make_oracle,
        conserves=exact,
        rtol=1e-6,
        bucket_invariant=True,
        wire=frozenset({"s32", "f32"} if exact else {"s32", "u16"}),
        dense_wire=exact,
        infinite_at=65504.0 if dtype == "float16" else float("inf"),
        rare=not exact,
    )


ROWS = [
    row("float32"),
    row("bfloat16", "all_gather"),
    row("float16", "all_gather"),
    row("float16", "two_phase"),
]


def chain(axis_name, learning_rate):
    return optax.chain(gcjax.dense_compress(axis_name=axis_name), optax.sgd(learning_rate))


CHAINS = {"dense_compress": chain}
