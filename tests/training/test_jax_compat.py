"""A JAX without a name that gcjax needs is refused on import; one that is newer than the tested ones is named."""

import runpy
import warnings

import jax
import pytest

import gcjax
from gcjax import _jax_compat


@pytest.mark.parametrize(
    "name",
    [
        "jax._src.config._check_vma",
        "jax._src.core.JaxprEqn.ctx",
        "jax._src.core.ShapedArray.mat",
        "jax._src.distributed.global_state",
        "jax.lax.pcast",
    ],
)
def test_missing_jax_name_raises_import_error(name, monkeypatch):
    monkeypatch.delattr(name)
    says = rf"needs {name}, which JAX {jax.__version__} does not have.* pip install 'jax<0.13'"
    with pytest.raises(ImportError, match=says):
        runpy.run_path(_jax_compat.__file__)


def test_missing_jax_module_raises_import_error():
    with pytest.raises(ImportError, match=r"needs jax\._src\.elsewhere\.state, which"):
        _jax_compat.needed("jax._src.elsewhere:state")


@pytest.mark.parametrize("version", [(0, 13, 0), (0, 13, 2, 1), (1, 0, 0)])
def test_newer_series_of_jax_warns_once_and_names_both(version, monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", version)
    named = ".".join(map(str, version))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        runpy.run_path(_jax_compat.__file__)
    (warning,) = caught
    assert warning.category.__name__ == gcjax.UntestedJaxWarning.__name__
    assert f"tested with JAX up to 0.12, and {named} is installed" in str(warning.message)


@pytest.mark.parametrize("version", [(0, 10, 0), (0, 10, 2), (0, 11, 0), (0, 12, 0, 1), (0, 12, 9)])
def test_tested_series_of_jax_do_not_warn(version):
    _jax_compat.warn_if_untested(version)  # warnings are errors


def test_installed_jax_has_all_names():
    runpy.run_path(_jax_compat.__file__)
