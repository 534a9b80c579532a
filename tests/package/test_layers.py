"""The order of the package's parts, parsed from its imports."""

import ast
import pathlib
import re

import pytest

import gcjax

ROOT = pathlib.Path(gcjax.__file__).parent

# A part imports only from parts before it. A part is a module of the package or a sub-package.
ORDER = [
    *("_version", "_types", "_jax_compat", "_xla", "_hlo", "_validation", "_units"),
    *("_kernels", "_comm", "_core", "_sparse", "_dense", "extend", "methods", "contrib", "_table"),
    *("_moments", "_training", "_planner", "gossip", "_export"),
    *("__init__", "flax", "_selfcheck", "__main__"),  # these last three are imported by users only
]
# A method imports only these, so that everything it needs of the core is public in gcjax.extend.
OF_METHODS = {"_types", "_jax_compat", "_xla", "_validation", "_kernels", "_sparse", "extend"}
COLLECTIVES = {"psum", "pmean", "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "psum_scatter", "axis_index"}
FILES = sorted(ROOT.rglob("*.py"))


def part(path):
    """The module or sub-package of gcjax that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path):
    """The parts of gcjax that a file imports."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gcjax":
            parts = node.module.split(".")[1:]
            names |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("gcjax.")}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
    return names


def test_every_part_has_a_place():
    assert {part(path) for path in FILES} == set(ORDER)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_follow_the_order(path):
    for name in imported(path) - {part(path)}:
        assert ORDER.index(name) < ORDER.index(part(path)), f"{path} imports {name}"


def test_methods_use_what_outsiders_use():
    for room in ("methods", "contrib"):
        for path in (ROOT / room).glob("*.py"):
            if path.name != "__init__.py":
                assert imported(path) <= OF_METHODS, path


def named_collectives(tree):
    """Collectives of JAX that a module names: as attributes of `lax`, or imported from `jax.lax`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES:
            owner = node.value
            if getattr(owner, "id", getattr(owner, "attr", "")) == "lax":
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and node.module == "jax.lax":
            yield from COLLECTIVES & {alias.name for alias in node.names}


def test_only_comm_names_collectives():
    for path in FILES:
        found = set(named_collectives(ast.parse(path.read_text())))
        if part(path) == "_jax_compat":
            found -= {"axis_index"}
        assert not found or part(path) == "_comm", f"{path}: {found}"
    assert set(named_collectives(ast.parse((ROOT / "_comm/collectives.py").read_text()))) >= {"psum", "all_gather"}


def test_nothing_prints_or_asserts():
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}"
            prints = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
            assert not prints or part(path) == "__main__", path


def test_the_page_of_the_house_has_the_rooms_in_this_order():
    page = (ROOT.parent / "docs/house.md").read_text()
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `")]
    assert [name.rstrip("/") for row in rows for name in re.findall(r"`([\w/]+)`", row)] == ORDER
