"""The gradient and the sum of squared per-sample gradients in one backward pass.

A sink is an equation of the backward pass that makes a weight's gradient: a matrix product, a convolution or a
scatter-add of rows. Both sums over samples are made there, so no array of batch x parameters exists.

  api          `value_and_moments`
  check        `check_moments`
  explain      `explain_moments`
  problem      checks options and arguments, and splits the batch into groups of samples
  compute      chooses the method, computes the moments and loops over chunks of groups
  sink_search  walks back from each gradient to its sinks
  aux          auxiliary output of the batch, from that of its groups
  precision    the dtypes in which a loss computes, and how far rounding errors may lead
  program      traces the backward pass, and runs the part of it that is needed
  jaxprs       types of jaxprs, and what is known of their variables before anything runs
  rules/       one module per kind of node that the search finds; `rules/node` is what they share

Imports only `_types`, `_validation` and `_jax_compat`. Any other package may import the four names below, and nothing
else from here.
"""

from gcjax._moments.api import Moments, value_and_moments
from gcjax._moments.check import check_moments
from gcjax._moments.explain import explain_moments

__all__ = ["Moments", "check_moments", "explain_moments", "value_and_moments"]
