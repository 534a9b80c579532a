"""Mistakes that train worse or save nothing without failing: compressors record their signs; here they raise."""

from gcjax._core.info import readable_states, report_of
from gcjax._core.symptoms import SAMPLE
from gcjax._types import PyTree

CERTAIN = 3  # this many equal gradients are no coincidence
SCALED = 0.05  # a ratio of the gradient to its squares that noise and small gradients do not reach
_TURN_OFF = "Then do not call check_training, and pass checks=False to make_train_step"


def check_training(opt_state: PyTree) -> None:
    """Raise if the updates so far show a mistake that trains worse or saves nothing, without failing.

    Call it after a few dozen steps, and again after changes; `gcjax.make_train_step` calls it once. It fetches a few
    numbers, as `gcjax.info` does.

    Args:
      opt_state: as for `gcjax.info`.

    Raises:
      ValueError: the workers' gradients are equal, so they were reduced before the compressor or all workers have the
        same batch; some worker had the state of another; the gradient was scaled without its squares; or as
        `gcjax.info`. The message names the cure.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.top_k_compress(0.5)
    >>> gcjax.check_training(tx.update(jnp.ones(4), tx.init(jnp.ones(4)))[1])
    """
    check_symptoms(opt_state)


def check_symptoms(opt_state: PyTree, *, expect_identical: bool = False, expect_scaled: bool = False) -> None:
    """`check_training`, without what the caller knows to be no mistake.

    Args:
      opt_state: as for `gcjax.info`.
      expect_identical: the sampled entries of all workers' gradients may be equal.
      expect_scaled: the gradients may be far smaller than their squares say.

    Raises:
      ValueError: see `check_training`.
    """
    seen = [report_of(state).symptoms for state in readable_states(opt_state)]
    misplaced, identical = (max(int(getattr(s, name)[0]) for s in seen) for name in ("misplaced", "identical"))
    ratio = min(float(s.squares_ratio[0]) for s in seen)
    if misplaced:
        raise ValueError(
            f"in {misplaced} updates some worker had the state of another, so residuals were lost or taken "
            "twice. State is per worker: return it from jax.shard_map with out_specs=gcjax.state_specs(state), from "
            "jax.pmap with out_axes=0, and save and restore all of it"
        )
    if identical >= CERTAIN and not expect_identical:
        raise ValueError(
            f"in {identical} updates all workers had the same gradient: compressing it saves nothing. Either it "
            "was averaged before the compressor (leave out lax.pmean and lax.psum of gradients, also of the loss), or "
            "all workers have the same batch and random keys. This was seen in the middle of each parameter, in up to "
            f"{SAMPLE} entries. It is no mistake if the rest differs: if all parameters are look-up tables, no batch "
            f"has used their middle rows, and the loss has a penalty on all rows. {_TURN_OFF}"
        )
    if ratio < SCALED and not expect_scaled:
        raise ValueError(
            f"the squares of the gradients are {1 / ratio:,.0f} times too large: something "
            "before the compressor has scaled or clipped the gradient, but not sum_grad_squared, so that next to "
            "nothing is sent. Use gcjax.scale_first(scaling, compressor), or put the scaling after the compressor. "
            f"It is no mistake if training has converged on a batch that is always the same. {_TURN_OFF}"
        )
