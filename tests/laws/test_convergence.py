"""Every method, in the chain that its docstring recommends, reaches the common optimum of workers that disagree."""

import pytest
from optimum import STEPS, decaying, distance_after_training
from rows import chains
from selection import cases

pytestmark = pytest.mark.filterwarnings("ignore::gcjax.MissingSquaresWarning")  # its workers have one sample each

# By design: a vote ends at the entrywise median of what the workers want, and moves by steps of the learning rate; the
# paper's rounding to powers of two is biased, and the rounding error is not kept; with momentum factor masking, workers
# that send an entry seldom count more.
STALLS = {"sign_vote_compress", "signum_compress", "variance_compress", "dgc_compress"}

# Unbiased, but of so much variance that it takes this many times the steps to average it out.
LONGER = {"terngrad_compress": 16}


# Entries, a ladder of them, signs, levels, low rank, momentum inside.
USUAL = {f"{name}_compress" for name in ("top_k", "variance", "ef_sign", "qsgd", "power_sgd", "dgc")}


@cases(
    "name",
    sorted(chains()),
    default=(lambda name: name in USUAL, 2),
)
def test_the_recommended_chain_reaches_the_common_optimum(name):
    distance = distance_after_training(chains()[name]("data", decaying), STEPS * LONGER.get(name, 1))
    if name in STALLS:
        assert distance > 0.1
    else:
        assert distance < 0.02
