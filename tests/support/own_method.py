"""The method that docs/extend.md writes, as a row for the laws."""

import pathlib
import re

from rows import Row

TEXT = (pathlib.Path(__file__).parents[2] / "docs/extend.md").read_text()
SOURCE = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]
NAMES: dict = {}
exec(compile(SOURCE, "extend.md", "exec"), NAMES)


def make(axis_name=None, **more):
    return NAMES["scaled_sign_compress"](axis_name=axis_name, **more)


ROW = Row("scaled_sign", "scaled_sign_compress", make, None, conserves=True)
