"""The README does what it says."""

import re

import readme_table
from rows import methods

import gcjax
from gcjax.methods import METHODS

README = readme_table.README.read_text()


def test_code_blocks_run_in_order(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 5
    names = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert float(capsys.readouterr().out) > 0
    assert names["sent"].wire_bytes > 0


def test_table_of_methods_is_current():
    assert README.count(readme_table.BEGIN) == README.count(readme_table.END) == 1
    assert readme_table.with_table(README) == README, "run python tests/support/readme_table.py"


def test_every_method_has_a_row_and_a_law():
    exported = {name for name in gcjax.__all__ if name.endswith("_compress")}
    in_readme = set(re.findall(r"^\| `(\w+_compress)", README, re.MULTILINE))
    assert exported == {f"{name}_compress" for name in METHODS} == in_readme
    assert exported == {row.public for row in methods()}


def test_links_lead_to_files():
    pages = [readme_table.README, readme_table.README.parent / "bench/results/training.md"]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([\w./-]+)\)", page.read_text())]
    assert len(links) > 15
    assert [link for page, link in links if not (page.parent / link).exists()] == []
