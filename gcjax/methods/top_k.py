"""Top-k sparsification: send the k entries of largest magnitude, exactly.

**Source.** Dan Alistarh, Torsten Hoefler, Mikael Johansson, Nikola Konstantinov, Sarit Khirirat, Cedric Renggli, "The
Convergence of Sparsified Gradient Methods", NeurIPS 2018, arXiv 1809.10505; Sebastian Stich, Jean-Baptiste Cordonnier,
Martin Jaggi, "Sparsified SGD with Memory", NeurIPS 2018, arXiv 1809.07599 (MEM-SGD).

**Wire format.** One uint32 vector per worker and bucket: the number of entries used (1 word); k indices; k float32
values. k is rounded up to a multiple of 32 by padding.

**Deviations.** k counts over the whole model, not per layer (per part of 2**28 entries above that). Zeros are not sent,
so fewer than k may be. Of equal magnitudes the lowest index goes first.
"""

import optax

from gcjax._validation import check_number
from gcjax.extend import compress, count_for_density, sparse_method, top_k_mask


def top_k_compress(
    density, *, transport="all_gather", axis_name=None, inner_axis_name=None
) -> optax.GradientTransformationExtraArgs:
    r"""Sends the k entries of largest magnitude of gradient plus residual, k = max(1, floor(density * parameters)).

    .. math::
        a = g + e, \qquad \text{send the } k \text{ entries with the largest } |a|, \qquad e \leftarrow a - \text{sent}

    and the update is the mean over workers of what they sent. Without the residual e, top-k does not converge; with
    it, :math:`\|e\|^2 \le (1 - k/d) \|a\|^2`.

    Costs a float32 and a bit per parameter in state; 64 bits per sent entry on the wire. Momentum, weight decay and
    learning rate come after it: `optax.chain(gcjax.top_k_compress(0.01), optax.sgd(0.1))`. Momentum on sent entries
    that have waited long loses accuracy at low densities; `gcjax.dgc_compress` corrects for that.

    Args:
      density: share of the entries to send, in (0, 1].
      transport: as in `gcjax.variance_compress`.
      axis_name, inner_axis_name: as in `gcjax.compress`.

    Returns:
      An `optax.GradientTransformationExtraArgs`.

    Raises:
      ValueError: for a density out of range.

    **Randomness**: none. **Bias**: entries are delayed; nothing is lost. **Non-finite input**: the update is NaN on all
    workers and every worker's state stays as it was.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.top_k_compress(density=0.5)
    >>> g = jnp.array([3.0, -1.0, 2.0, 0.5])
    >>> first, state = tx.update(g, tx.init(g))
    >>> second, state = tx.update(jnp.zeros(4), state)
    >>> print(first, second)
    [3. 0. 2. 0.] [ 0.  -1.   0.   0.5]
    """
    check_number("density", density, 0.0, 1.0)

    def select(a, step, bucket):
        del step
        return top_k_mask(a, count_for_density(density, bucket.entries))

    def slots(bucket):
        return count_for_density(density, bucket.entries)

    return compress(sparse_method(select, slots, transport), axis_name=axis_name, inner_axis_name=inner_axis_name)
