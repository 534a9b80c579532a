"""The layering of the package, parsed from its imports."""

import ast
import pathlib

import gcjax

ROOT = pathlib.Path(gcjax.__file__).parent

# A module imports only from lines above its own, never sideways.
LAYERS = [
    {"_types", "_compat", "_checks"},
    {"_bits", "_moments", "_random"},
    {"_compact", "_layout"},
    {"_codec", "_groups", "_matrices"},
    {"_payload", "_select"},
    {"_owners"},
    {"_sparse"},
    {"_exchange", "_feedback"},
    {"_transform"},
    {"_agree", "_delay", "_info", "_place", "methods"},
    {"_train", "_imitate"},
    {"_costs", "_network"},
    {"_plan", "gossip"},
    {"__init__"},
    {"flax", "__main__"},  # helpers for Flax models, imported by users only; the command line
]
COLLECTIVES = {"psum", "pmean", "pmax", "pmin", "all_gather", "all_to_all", "ppermute", "psum_scatter", "axis_index"}


def unit(path: pathlib.Path) -> str:
    """The module or sub-package of gcjax that a file belongs to."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def level(name: str) -> int:
    return next(i for i, layer in enumerate(LAYERS) if name in layer)


def imported(path: pathlib.Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "gcjax":
            parts = node.module.split(".")[1:]
            names |= {parts[0]} if parts else {alias.name for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {a.name.split(".")[1] for a in node.names if a.name.startswith("gcjax.")}
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: relative import"
    return names


def files():
    return sorted(ROOT.rglob("*.py"))


def test_every_module_has_a_layer():
    assert {unit(p) for p in files()} == set().union(*LAYERS)


def test_modules_import_only_from_layers_above():
    for path in files():
        own = unit(path)
        for name in imported(path) - {own}:
            assert level(name) < level(own), f"{own} imports {name}"


def test_methods_do_not_import_each_other():
    for path in (ROOT / "methods").glob("*.py"):
        assert "methods" not in imported(path), path


def test_only_the_exchange_names_a_collective():
    for path in files():
        if unit(path) in ("_exchange", "_moments"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
            assert name not in COLLECTIVES or (unit(path) == "_compat" and name == "axis_index"), f"{path}: {name}"


def test_nothing_prints_or_asserts():
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}"
            prints = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "print"
            assert not prints or unit(path) == "__main__", path
