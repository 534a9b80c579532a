"""The gradient and the sum of squared per-sample gradients in one backward pass."""

from gcjax._moments.api import Moments, value_and_moments
from gcjax._moments.check import check_moments
from gcjax._moments.explain import explain_moments

__all__ = ["Moments", "check_moments", "explain_moments", "value_and_moments"]
