"""A JAX release without a name that gcjax needs is refused on import."""

import runpy

import jax
import pytest

from gcjax import _jax_compat


@pytest.mark.parametrize(
    "name",
    [
        "jax._src.config._check_vma",
        "jax._src.core.NamedAxisEffect",
        "jax._src.core.ShapedArray.mat",
        "jax._src.distributed.global_state",
        "jax.extend.core.Literal",
    ],
)
def test_missing_jax_name_raises_import_error(name, monkeypatch):
    monkeypatch.delattr(name)
    known = _jax_compat.KNOWN_VERSIONS[-1]
    says = rf"needs {name}, which JAX {jax.__version__} does not have.* {known}.* pip install jax=={known}"
    with pytest.raises(ImportError, match=says):
        runpy.run_path(_jax_compat.__file__)


def test_missing_jax_module_raises_import_error():
    with pytest.raises(ImportError, match=r"needs jax\._src\.elsewhere\.state, which"):
        _jax_compat.needed("jax._src.elsewhere:state")


@pytest.mark.parametrize("version", [(0, 9, 2), (0, 11, 0), (0, 12, 0, 1), (1, 0, 0)])
def test_unknown_jax_raises_import_error(version):
    with pytest.raises(ImportError, match=rf"does not know JAX {version[0]}\.{version[1]}.*pip install jax==0\.10\.2"):
        _jax_compat.check_version(version)


def test_known_jax_passes():
    for version in _jax_compat.KNOWN_VERSIONS:
        _jax_compat.check_version(tuple(map(int, version.split("."))))


def test_installed_jax_has_all_names():
    assert runpy.run_path(_jax_compat.__file__)["KNOWN_VERSIONS"] == _jax_compat.KNOWN_VERSIONS
