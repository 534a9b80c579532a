"""Majority vote of signs, one bit per entry each way: signSGD, and Signum, which votes with each worker's momentum.

**Source.** Jeremy Bernstein, Yu-Xiang Wang, Kamyar Azizzadenesheli, Anima Anandkumar, "signSGD: Compressed Optimisation
for Non-Convex Problems", ICML 2018, arXiv 1802.04434; Jeremy Bernstein, Jiawei Zhao, Kamyar Azizzadenesheli, Anima
Anandkumar, "signSGD with Majority Vote is Communication Efficient And Fault Tolerant", ICLR 2019, arXiv 1810.05291,
algorithm 1.

**Wire format.** Per bucket, first an all-to-all: every worker sends every other one its share of the mask words of the
signs (uint32; 1 for negative; `gcjax.extend.pack_mask`), and worker w counts the votes for the w-th share. Then an
all-gather of the majorities in the same form.

**Deviations.** The workers share the work of the paper's server, so that none sends or receives more than two bits per
entry, however many there are. A bit has no third value: a zero is sent as plus and a tie is plus, where the paper's
sign(0) is 0. The learning rate and the decoupled weight decay come after the vote in the chain.
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax

from gcjax._types import Array, ArrayLike, AxisNames
from gcjax._validation import check_number
from gcjax.extend import (
    Bucket,
    Comm,
    Compressor,
    EmptyState,
    SendReport,
    StepInput,
    StepResult,
    compress,
    dense_report,
    pack_mask,
    unpack_mask,
)

_UNROLLED = 16  # votes added in one pass


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SignumState:
    """State of one worker and bucket.

    Attributes:
      momentum: float32 of the bucket's shape, m, this worker's own.
      bucket: where the leaves lie. Static.
    """

    momentum: Array
    bucket: Bucket = dataclasses.field(metadata={"static": True})

    @property
    def residual(self) -> Array:
        """float32 of the bucket's shape, zero: momentum does not wait to be sent, and what is not sent is dropped."""
        return jnp.zeros(self.bucket.shape)


def sign_vote_compress(
    *, axis_name: AxisNames = None, inner_axis_name: AxisNames = None
) -> optax.GradientTransformationExtraArgs:
    """Every worker votes on the sign of each entry; the update is the sign with most votes.

        update = sign(sum over workers of sign(g)), -1 or +1

    A zero votes plus, and a tie is plus: exclude parameters that few batches use, such as rows of embeddings, with
    `optax.partition`, or they move in every step. The vote is biased, and nothing corrects it: where workers disagree,
    training ends at the entrywise median of their optima. With noisy and skewed gradients it may not descend at all;
    `gcjax.ef_sign_compress` corrects the bias. A minority of workers cannot change entries on which the others agree.

    State: none. Wire: 1 bit per parameter each way, for any number of workers. Every entry moves by the learning rate,
    which must be much smaller than that of SGD: Vogels et al. (arXiv 1905.13727) used 5e-5 for images and 1e-5 for
    language, and 0.1 and 1.25 for SGD. The optimiser comes after it: `optax.chain(gcjax.contrib.sign_vote_compress(),
    optax.add_decayed_weights(1e-4), optax.sgd(1e-4))`.

    Args:
      axis_name, inner_axis_name: see docs/common.md.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.contrib.sign_vote_compress()
    >>> updates, _ = tx.update(jnp.array([3.0, -0.1, 0.0]), tx.init(jnp.zeros(3)))
    >>> print(updates)
    [ 1. -1.  1.]
    """

    def update(step: StepInput, state: EmptyState) -> StepResult[EmptyState]:
        bucket = state.bucket
        return StepResult(_vote(bucket.join(step.gradient), bucket, step.comm, step.go), state, _report(bucket))

    method = Compressor(EmptyState, update)
    return compress(method, axis_name=axis_name, inner_axis_name=inner_axis_name)


def signum_compress(
    momentum: ArrayLike = 0.9,
    *,
    axis_name: AxisNames = None,
    inner_axis_name: AxisNames = None,
) -> optax.GradientTransformationExtraArgs:
    """Every worker votes with the sign of its own momentum; the update is the sign with most votes.

        m <- momentum * m + (1 - momentum) * g
        update = sign(sum over workers of sign(m))

    Zeros, ties, bias and the small learning rate are as in `gcjax.contrib.sign_vote_compress`, which has a momentum of
    0.

    State: a float32 per parameter. Wire: 1 bit per parameter each way, for any number of workers. Use no momentum after
    it: `optax.chain(gcjax.contrib.signum_compress(0.9), optax.add_decayed_weights(1e-4), optax.sgd(1e-4))`.

    Args:
      momentum: beta, in [0, 1). May be traced (`optax.inject_hyperparams`).
      axis_name, inner_axis_name: see docs/common.md.

    Raises:
      ValueError: for a momentum out of range.

    >>> import gcjax, jax.numpy as jnp
    >>> tx = gcjax.contrib.signum_compress(momentum=0.5)
    >>> first, state = tx.update(jnp.array([4.0, -4.0]), tx.init(jnp.zeros(2)))  # m: 2, -2
    >>> second, state = tx.update(jnp.array([-1.0, 3.0]), state)  # m: 0.5, 0.5
    >>> print(first, second)
    [ 1. -1.] [1. 1.]
    """
    check_number("momentum", momentum, 0.0, 1.0, low_included=True, high_included=False)

    def init(bucket: Bucket) -> SignumState:
        return SignumState(jnp.zeros(bucket.shape), bucket)

    def update(step: StepInput, state: SignumState) -> StepResult[SignumState]:
        bucket = state.bucket
        m = momentum * state.momentum + (1 - momentum) * bucket.join(step.gradient)
        m = jnp.where(step.go, m, state.momentum)
        return StepResult(_vote(m, bucket, step.comm, step.go), SignumState(m, bucket), _report(bucket))

    return compress(Compressor(init, update), axis_name=axis_name, inner_axis_name=inner_axis_name)


def _report(bucket: Bucket) -> SendReport:
    return dense_report(bucket.entries, bucket.entries)


def _vote(x: Array, bucket: Bucket, comm: Comm, go: Array) -> tuple[Array, ...]:
    """The sign, +1 or -1, of each entry on most workers, for each leaf; NaN unless `go`."""
    words = pack_mask(x < 0)[: bucket.words]
    share = -(-len(words) // comm.size)
    shares = jnp.pad(words, (0, share * comm.size - len(words))).reshape(comm.size, share)
    voted = comm.gather(_majority(comm.all_to_all(shares))).reshape(-1)[: len(words)]
    return bucket.split(jnp.where(go, jnp.where(unpack_mask(voted), -1.0, 1.0), jnp.nan))


def _majority(votes: Array) -> Array:
    """uint32[p, m] -> uint32[m]: a bit is set where more than half of the p words have it set.

    Word k holds bit k of the counts of all 32 bits. Counts start so far below a power of two that the vote that makes a
    majority takes them to it.
    """
    workers = len(votes)
    top = (workers // 2).bit_length()
    start = (1 << top) - (workers // 2 + 1)
    zero = votes[0] & 0  # typed as varying like the votes, because the carry of a scan must keep its type
    planes = tuple(~zero if start >> k & 1 else zero for k in range(top + 1))

    def add(planes: tuple[Array, ...], carry: Array) -> tuple[tuple[Array, ...], None]:
        total = []
        for plane in planes:
            total.append(plane ^ carry)
            carry = plane & carry
        return tuple(total), None

    return jax.lax.scan(add, planes, votes, unroll=min(workers, _UNROLLED))[0][top]
