"""Top-k sparsification: send the k entries of largest magnitude, exactly.

**Source.** Dan Alistarh, Torsten Hoefler, Mikael Johansson, Nikola Konstantinov, Sarit Khirirat, Cedric Renggli, "The
Convergence of Sparsified Gradient Methods", NeurIPS 2018, arXiv 1809.10505; Sebastian Stich, Jean-Baptiste Cordonnier,
Martin Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv 1809.07599 (MEM-SGD).

**Wire format.** One uint32 vector per worker and bucket: the number of entries used (1 word); then the entries with
float32 values, in the compact form of `gcjax._sparse.wire`.
k is rounded up to whole groups of slots by padding.

**Deviations.** k counts the entries of the whole model (of each bucket of a model above 2**28 entries), not those of a
layer. Zeros are not sent, so fewer than k entries may be. Ties go to the lowest index on the wire.
"""

import optax

from gcjax._sparse.method import method_without_padding
from gcjax._types import Array, AxisNames
from gcjax._validation import static_share
from gcjax.extend import Bucket, compress, count_for_density, top_k_mask


def top_k_compress(
    density: float,
    *,
    transport: str = "auto",
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Sends the k entries of largest magnitude of gradient plus residual, k = max(1, floor(density * parameters)).

        a = g + e
        send the k entries with the largest |a|
        e <- a - sent

    The update is the mean over workers of the sent entries. Entries are delayed, which biases a step; nothing is lost,
    and |e|^2 <= (1 - k / d) |a|^2. At low densities entries wait long, and momentum applied after that loses accuracy;
    `gcjax.dgc_compress` corrects for it.

    State: a float32 and a bit per parameter. Wire: 41 bits per sent entry at density 1/100. The optimiser comes after
    it: `optax.chain(gcjax.top_k_compress(0.01), optax.sgd(0.1))`.

    Args:
      density: share of the entries to send, in (0, 1].
      transport, axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for a density out of range.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.top_k_compress(density=0.5)
    >>> g = jnp.array([3.0, -1.0, 2.0, 0.5])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(jnp.zeros(4), state)
    >>> print(first, second)
    [3. 0. 2. 0.] [ 0.  -1.   0.   0.5]
    """
    density = static_share("density", density)

    def count(bucket: Bucket) -> int:
        return count_for_density(density, bucket.entries)

    def select(a: Array, step: Array, bucket: Bucket) -> Array:
        del step
        return top_k_mask(a, count(bucket))

    method = method_without_padding(select, count, transport)
    return compress(method, axis_name=axis_name, inner_axis_name=inner_axis_name)
