"""No compression: the dense mean, on the same path as every method, as the baseline.

**Wire format.** float32: one all-reduce of the leaves. bfloat16 and float16: an all-gather of the values' bits as
uint16, which every worker sums in float32. (Some backends widen 16-bit all-reduces to 32 bits.)
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax

from gcjax._types import Array, AxisNames
from gcjax._validation import check_choice
from gcjax.extend import Bucket, Compressor, compress, dense_report, gather_mean

DTYPES = ("float32", "bfloat16", "float16")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseState:
    """Nothing is kept.

    Attributes:
      bucket: where the leaves lie. Static.
    """

    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32 of the bucket's shape, zero."""
        return jnp.zeros(self.bucket.shape)


def dense_compress(
    dtype: str | jax.typing.DTypeLike = "float32", *, axis_name: AxisNames = None, inner_axis_name: AxisNames = None
) -> optax.GradientTransformationExtraArgs:
    """The mean of the workers' gradients, sent whole: 4 or 2 bytes per parameter.

    Args:
      dtype: dtype on the wire: "float32", "bfloat16" or "float16", or such a dtype. float16 turns magnitudes above
        65,504 into infinities.
      axis_name, inner_axis_name: as in `gcjax.compress`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: for another dtype.

    **Randomness**: none. **Bias**: 16-bit values are rounded to the nearest. **Non-finite input**: NaN on all workers.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.dense_compress()
    >>> updates, _ = tx.update(jnp.array([1.0, 2.0]), tx.init(jnp.zeros(2)))
    >>> print(updates)
    [1. 2.]
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    check_choice("dtype", name, DTYPES)

    def widen(bits):
        return jax.lax.bitcast_convert_type(bits, jnp.dtype(name)).astype(jnp.float32)

    def update(gradient, sum_grad_squared, state, comm, all_finite):
        del sum_grad_squared
        if name == "float32":
            mean = comm.mean(tuple(gradient))
        else:
            flat = jnp.concatenate([g.reshape(-1) for g in gradient])
            sent = jax.lax.bitcast_convert_type(flat.astype(name), jnp.uint16)
            mean = gather_mean(sent, widen, flat.shape, comm, all_finite)
            parts = jnp.split(mean, np.cumsum([g.size for g in gradient])[:-1])
            mean = [part.reshape(g.shape) for part, g in zip(parts, gradient, strict=True)]
        entries = state.bucket.entries
        report = dense_report(entries, entries * (32 if name == "float32" else 16))
        return tuple(jnp.where(all_finite, x, jnp.nan) for x in mean), state, report

    return compress(Compressor(DenseState, update), axis_name=axis_name, inner_axis_name=inner_axis_name)
