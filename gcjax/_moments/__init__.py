"""The gradient and the sum of squared per-sample gradients in one backward pass.

A sink is an equation of the backward pass that makes a weight's gradient: a matrix product, a convolution or a
scatter-add of rows. Both sums over samples are made there, so no array of batch x parameters exists.
"""

from gcjax._moments.api import Moments, value_and_moments
from gcjax._moments.check import check_moments
from gcjax._moments.explain import explain_moments

__all__ = ["Moments", "check_moments", "explain_moments", "value_and_moments"]
