"""Everything that a method of your own needs.

A method is a `Compressor`, two pure functions over the leaves of a `Bucket`: `init(bucket)` returns the state, and
`update(step, state)` takes a `StepInput` and returns a `StepResult`. `compress` makes an optax transform of it. Most
methods need less than that:

- a method that works on the plain array of one leaf is a pair `compress`, `decompress` for `leaf_codec`;
- a method that sends a code of every entry is a pair `encode`, `decode` for `dense_codec`;
- a method that sends the entries it selects is a function `select` for `sparse_method`;
- a sparse method with state or a value code of its own uses `SparseState`, `Message` and `exchange`;
- any other method uses the collectives of `Comm` directly.

Every method is under the laws that `Compressor` states: bit-equal updates on all workers, NaN everywhere and an
unchanged state where `go` is False, and a report that says what was sent.
"""

from gcjax._comm.comm import Comm
from gcjax._core.compressor import Compressor, EmptyState, SendReport, StepInput, StepResult, dense_report
from gcjax._core.mixing import Mixing
from gcjax._core.per_worker import PerWorker
from gcjax._core.state import CompressState
from gcjax._core.transform import compress
from gcjax._dense.codec import CodecState, dense_codec, gather_mean, parameters_only
from gcjax._dense.leaf import LeafState, leaf_codec
from gcjax._dense.parts import add_decoded, goes_through_owners
from gcjax._kernels.bits import pack_mask, pack_planes, pack_uint, unpack_mask, unpack_planes, unpack_uint
from gcjax._kernels.buckets import Bucket, Segment
from gcjax._kernels.floats import bits_float, float_bits
from gcjax._kernels.groups import Groups, block_groups, leaf_groups, whole_group
from gcjax._kernels.hashing import hash_bits, step_key, uniform
from gcjax._sparse.capacities import capacities_for, check_capacity
from gcjax._sparse.exchange import exchange
from gcjax._sparse.message import Exchanged, Message
from gcjax._sparse.method import sparse_method
from gcjax._sparse.owners import TransportState
from gcjax._sparse.selection import count_for_density, top_k_mask
from gcjax._sparse.state import Reset, SparseState, TakeIn, add_gradient, reset_to_zero
from gcjax._sparse.value_codes import (
    ValueCode,
    class_mean_code,
    float_code,
    power_of_two_code,
    sign_code,
)
from gcjax._sparse.wire import check_wire
from gcjax._validation import check_transport

__all__ = [
    "Bucket",
    "CodecState",
    "Comm",
    "CompressState",
    "Compressor",
    "EmptyState",
    "Exchanged",
    "Groups",
    "LeafState",
    "Message",
    "Mixing",
    "PerWorker",
    "Reset",
    "Segment",
    "SendReport",
    "SparseState",
    "StepInput",
    "StepResult",
    "TakeIn",
    "TransportState",
    "ValueCode",
    "add_decoded",
    "add_gradient",
    "bits_float",
    "block_groups",
    "capacities_for",
    "check_capacity",
    "check_transport",
    "check_wire",
    "class_mean_code",
    "compress",
    "count_for_density",
    "dense_codec",
    "dense_report",
    "exchange",
    "float_bits",
    "float_code",
    "gather_mean",
    "goes_through_owners",
    "hash_bits",
    "leaf_codec",
    "leaf_groups",
    "pack_mask",
    "pack_planes",
    "pack_uint",
    "parameters_only",
    "power_of_two_code",
    "reset_to_zero",
    "sign_code",
    "sparse_method",
    "step_key",
    "top_k_mask",
    "uniform",
    "unpack_mask",
    "unpack_planes",
    "unpack_uint",
    "whole_group",
]
