"""The method in docs/extend.md works, imports only public names, and keeps the laws."""

import ast
import pathlib
import re

import pytest
import test_laws
from rows import Row

TEXT = (pathlib.Path(__file__).parents[2] / "docs/extend.md").read_text()
BLOCK = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
NAMES: dict = {}
exec(compile(BLOCK, "extend.md", "exec"), NAMES)


def make(axis_name=None, **more):
    return NAMES["scaled_sign_compress"](axis_name=axis_name, **more)


ROW = Row("scaled_sign", "scaled_sign_compress", make, None, conserves=True)


def test_it_imports_only_public_names():
    for node in ast.walk(ast.parse(BLOCK)):
        if isinstance(node, ast.ImportFrom):
            assert "._" not in f".{node.module}"
            assert not any(alias.name.startswith("_") for alias in node.names)


@pytest.mark.parametrize(
    "law",
    [
        test_laws.test_nothing_is_lost,
        test_laws.test_the_update_is_bit_equal_on_all_workers,
        test_laws.test_the_update_is_typed_as_replicated,
        test_laws.test_the_wire_carries_only_the_payload_dtypes,
        test_laws.test_payload_bits_do_not_exceed_wire_bytes,
        test_laws.test_two_steps_trace_once,
    ],
    ids=lambda law: law.__name__,
)
def test_it_keeps_the_laws(law):
    law(ROW)


def test_its_wire_bytes_are_those_compiled():
    test_laws.test_wire_bytes_equal_the_compiled_collectives(ROW, 8)


def test_a_bad_step_leaves_no_trace():
    test_laws.test_a_non_finite_step_leaves_no_trace(ROW, float("nan"))
