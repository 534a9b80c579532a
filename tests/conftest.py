"""Eight virtual CPU devices for every test, set before JAX starts; generated inputs fixed in continuous integration."""

import gc
import itertools
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings

FLAGS = ["--xla_force_host_platform_device_count=8"]
if not os.environ.get("GCJAX_TEST_OPTIMISED"):  # set it to compile as users do
    # Cheap code generation compiles three times as fast. The passes that place collectives and choose their types are
    # the same, and these are what tests read in compiled programs.
    FLAGS += [
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
        "--xla_cpu_use_fusion_emitters=false",
        "--xla_llvm_disable_expensive_passes=true",
    ]


def flags_known_to_xla(flags):
    """Those of the flags that the installed XLA has. It aborts on others, and names them."""
    start = [sys.executable, "-c", "from jaxlib import xla_client; xla_client.make_cpu_client()"]
    environment = {**os.environ, "XLA_FLAGS": " ".join(flags)}
    asked = subprocess.run(start, env=environment, capture_output=True, text=True, check=False)
    unknown = re.findall(r"Unknown flags? in XLA_FLAGS:(.*)", asked.stderr)
    if asked.returncode and not unknown:
        raise RuntimeError(f"XLA does not start with the flags of the tests: {asked.stderr}")
    return [flag for flag in flags if flag not in " ".join(unknown).split()]


os.environ["JAX_PLATFORMS"] = "cpu"
if FLAGS[0] not in os.environ.get("XLA_FLAGS", ""):  # the processes of pytest-xdist inherit them
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *flags_known_to_xla(FLAGS)])
# Programs that have not changed since the last run are not compiled again. `pytest --cache-clear` forgets them.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "d" / "programs"))
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

# JAX's traces are many small objects that live long: by default a seventh of the time goes into looking for cycles.
gc.set_threshold(50_000, 20, 20)

settings.register_profile("fixed", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("fixed")

MAPS = Path("/proc/self/maps")
MANY_MAPS = 50_000
_tests_run = itertools.count()


def pytest_configure(config):
    """Groups of tests run in the order of their files: pytest-xdist would end with those of a few long tests."""
    config.option.loadscopereorder = False


def pytest_collection_modifyitems(items):
    """The tests of a file run in one process, which compiles once what they share, unless they name another group."""
    for item in items:
        if not item.get_closest_marker("xdist_group"):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


def pytest_terminal_summary(terminalreporter):
    import jax  # after the flags above

    passed = len(terminalreporter.stats.get("passed", []))
    terminalreporter.write_line(f"jax {jax.__version__}, Python {platform.python_version()}: {passed} passed")


@pytest.fixture(autouse=True)
def forget_programs_in_time():
    """Compiled programs take memory maps, some hundred each. Linux allows 65,530, and XLA crashes beyond that."""
    yield
    if next(_tests_run) % 10 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > MANY_MAPS:
        import jax

        jax.clear_caches()
        gc.collect()
