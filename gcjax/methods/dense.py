"""No compression: the dense mean, on the same path as every method, as the baseline.

**Wire format.** float32: one all-reduce of the leaves. bfloat16 and float16: an all-gather of the values' bits as
uint16, which every worker sums in float32. (Some backends widen 16-bit all-reduces to 32 bits.) In two phases: an
all-to-all of such bits, with which every worker gets one of as many equal pieces of the joined leaves, padded with
zeros; then an all-gather of the pieces' means, rounded again.
"""

import jax
import jax.numpy as jnp
import optax

from gcjax._kernels.buckets import split_vector
from gcjax._types import Array, AxisNames
from gcjax._validation import check_choice, check_transport
from gcjax.extend import (
    Comm,
    Compressor,
    EmptyState,
    StepInput,
    StepResult,
    add_decoded,
    compress,
    dense_report,
    gather_mean,
    goes_through_owners,
)

DTYPES = ("float32", "bfloat16", "float16")


def dense_compress(
    dtype: str | jax.typing.DTypeLike = "float32",
    *,
    transport: str = "auto",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """The mean of the workers' gradients, sent whole: 4 or 2 bytes per parameter.

    State: none. 16-bit values are rounded to the nearest, in two phases the mean as well; the rounding error is not
    kept.

    Args:
      dtype: dtype on the wire: "float32", "bfloat16" or "float16", or such a dtype. float16 turns magnitudes above
        65,504 into infinities.
      transport, axis_name, inner_axis_name: see docs/common.md. float32 values are all-reduced, by "auto" alone.

    Raises:
      ValueError: for another dtype; for another transport than "auto" with float32.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.dense_compress()
    >>> updates, _ = tx.update(jnp.array([1.0, 2.0]), tx.init(jnp.zeros(2)))
    >>> print(updates)
    [1. 2.]
    """
    name = dtype if isinstance(dtype, str) else jnp.dtype(dtype).name
    check_choice("dtype", name, DTYPES)

    check_transport(transport)
    if name == "float32" and transport != "auto":
        raise ValueError(f"transport={transport!r} needs a dtype of 16 bits: float32 values are all-reduced")

    def narrow(x: Array) -> Array:
        return jax.lax.bitcast_convert_type(x.astype(name), jnp.uint16)

    def widen(bits: Array) -> Array:
        return jax.lax.bitcast_convert_type(bits, jnp.dtype(name)).astype(jnp.float32)

    def mean_of_rounded(flat: Array, comm: Comm, go: Array) -> tuple[Array, int]:
        def piece(workers: int) -> int:
            return -(-flat.size // workers)

        if not goes_through_owners(transport, comm, piece):
            bits = narrow(flat)
            if comm.size == 1:  # nothing moves, and XLA would leave out the conversion and back
                bits = jax.lax.optimization_barrier(bits)
            return gather_mean(bits, widen, flat.shape, comm, go), flat.size
        width = piece(comm.size)
        rows = jnp.pad(flat, (0, comm.size * width - flat.size)).reshape(comm.size, width)
        own = add_decoded(jnp.zeros(width), comm.all_to_all(narrow(rows)), widen)
        return widen(comm.gather(narrow(own))).reshape(-1)[: flat.size], flat.size + width

    def update(step: StepInput, state: EmptyState) -> StepResult[EmptyState]:
        entries = state.bucket.entries
        if name == "float32":
            mean, bits = step.comm.mean(tuple(step.gradient)), 32 * entries
        else:
            flat, sent = mean_of_rounded(jnp.concatenate([g.reshape(-1) for g in step.gradient]), step.comm, step.go)
            mean, bits = split_vector(flat, [g.shape for g in step.gradient]), 16 * sent
        report = dense_report(entries, bits)
        return StepResult(tuple(jnp.where(step.go, x, jnp.nan) for x in mean), state, report)

    method = Compressor(EmptyState, update)
    return compress(method, axis_name=axis_name, inner_axis_name=inner_axis_name)
