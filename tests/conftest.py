"""Eight virtual CPU devices for every test, set before JAX starts; generated inputs fixed in continuous integration."""

import os

from hypothesis import settings

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

settings.register_profile("fixed", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("fixed")
