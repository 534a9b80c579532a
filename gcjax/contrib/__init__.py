"""Methods for comparison, one module each: `gcjax.contrib.strom_compress`.

They have the same interface and obey the same laws as those of `gcjax`.
"""

from gcjax.contrib.demo import demo_compress
from gcjax.contrib.drop import drop_compress
from gcjax.contrib.dryden import dryden_compress
from gcjax.contrib.gaussian_k import gaussian_k_compress
from gcjax.contrib.natural import natural_compress
from gcjax.contrib.random_k import random_k_compress
from gcjax.contrib.sign_vote import sign_vote_compress, signum_compress
from gcjax.contrib.sketch import sketch_compress
from gcjax.contrib.strom import strom_compress
from gcjax.contrib.terngrad import terngrad_compress

__all__ = [
    "demo_compress",
    "drop_compress",
    "dryden_compress",
    "gaussian_k_compress",
    "natural_compress",
    "random_k_compress",
    "sign_vote_compress",
    "signum_compress",
    "sketch_compress",
    "strom_compress",
    "terngrad_compress",
]
