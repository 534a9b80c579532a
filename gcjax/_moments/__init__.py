"""The gradient and the sum of squared per-sample gradients in one backward pass."""

from gcjax._moments._check import check_moments
from gcjax._moments._explain import explain_moments
from gcjax._moments._front import Moments, value_and_moments

__all__ = ["Moments", "check_moments", "explain_moments", "value_and_moments"]
