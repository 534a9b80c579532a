"""dense_compress: its rows, the oracle and the recommended chain."""

import functools

from codec_oracle import CodecOracle
from oracle import F

import gcjax
from rows import Row, before_sgd, made_by


def row(dtype, transport="all_gather"):
    """Sums over three or more workers may round in another order, so float32 is compared with a tolerance."""
    exact = dtype == "float32"
    options = {} if exact else {"transport": transport}

    def code(leaves, places, words):
        del places, words
        return [x.astype(dtype).astype(F) for x in leaves]

    return Row(
        f"dense-{dtype}{'-owners' * (transport == 'two_phase')}",
        "dense_compress",
        made_by(gcjax.dense_compress, dtype, **options),
        functools.partial(CodecOracle, code=code, transport=transport, owners_keep=False),
        conserves=exact,
        rtol=1e-6,
        bucket_invariant=True,
        wire=frozenset({"s32", "f32"} if exact else {"s32", "u16"}),
        dense_wire=exact,
        infinite_at=65504.0 if dtype == "float16" else float("inf"),
        rare=not exact,
    )


ROWS = [row("float32"), row("bfloat16"), row("float16"), row("float16", "two_phase")]
CHAINS = {"dense_compress": before_sgd(gcjax.dense_compress)}
