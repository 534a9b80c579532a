"""The README does what it says, on one page."""

import pathlib
import re

from rows import methods

import gcjax
from gcjax._table import METHODS

PAGE = pathlib.Path(__file__).parents[2] / "README.md"
README = PAGE.read_text()


def test_code_blocks_run_in_order(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    ratio, planned = capsys.readouterr().out.splitlines()
    assert float(ratio) == 2
    assert "Do not compress" in planned
    assert names["sent"].wire_bytes > 0
    assert names["plan"].best.speedup > 2


def test_it_is_one_page():
    assert README.count("\n") <= 140


def test_every_method_is_named_and_has_a_law():
    exported = set(gcjax.methods.__all__ + gcjax.contrib.__all__)
    (named,) = re.findall(r"## Methods\n(.*?)\n## ", README, re.DOTALL)
    assert exported == {f"{name}_compress" for name in METHODS} == set(re.findall(r"`(\w+_compress)`", named))
    assert exported == {row.public for row in methods()}
