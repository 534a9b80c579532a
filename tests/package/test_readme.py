"""The README does what it says."""

import pathlib
import re

import pytest

import gcjax

ROOT = pathlib.Path(__file__).parents[2]


def test_code_blocks_run_in_order(capsys):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(blocks) >= 5
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert float(capsys.readouterr().out) > 0
    assert names["sent"].wire_bytes > 0


def test_exports_readme_and_tests_list_the_same_methods():
    from rows import methods

    exported = {name for name in gcjax.__all__ if name.endswith("_compress")}
    in_readme = set(re.findall(r"^\| `(\w+_compress)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert exported == in_readme == {row.public for row in methods()}


@pytest.mark.full
def test_doctests_of_the_methods_run():
    import doctest
    import importlib
    import pkgutil

    import gcjax.methods

    names = [f"gcjax.methods.{found.name}" for found in pkgutil.iter_modules(gcjax.methods.__path__)]
    for name in [*names, "gcjax._core.delay"]:
        module = importlib.import_module(name)
        result = doctest.testmod(module)
        assert result.attempted > 0
        assert result.failed == 0
