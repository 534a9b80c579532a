"""The documentation without Sphinx: code that runs, names that are all there, figures from result files, links."""

import doctest
import inspect
import pathlib
import re

import pytest
import readme_table

import gcjax
import gcjax.flax

ROOT = pathlib.Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if not {"_build", "generated"} & set(path.parts))
TEXT = [*PAGES, ROOT / "README.md"]
MODULES = {
    "gcjax": gcjax,
    "contrib": gcjax.contrib,
    "gossip": gcjax.gossip,
    "flax": gcjax.flax,
    "extend": gcjax.extend,
}
TOO_LONG = {"measure_costs"}  # takes minutes, and writes a file
SHOWN_BY = {  # users get them from this function or class, whose doctest shows them
    "CodecState": "dense_codec",
    "Comm": "Compressor",
    "CompressState": "compress",
    "ConsensusDistance": "consensus_distance",
    "Curves": "simulate",
    "EmptyState": "dense_codec",
    "Exchanged": "exchange",
    "GossipInfo": "info",
    "GossipState": "swarm_average",
    "Info": "info",
    "LeafState": "leaf_codec",
    "Message": "exchange",
    "Metrics": "make_train_step",
    "Moments": "value_and_moments",
    "Plan": "plan",
    "ScaleFirstState": "scale_first",
    "SendReport": "dense_report",
    "SparseState": "exchange",
    "StepInput": "Compressor",
    "StepResult": "Compressor",
    "TrainState": "make_train_step",
    "TransportState": "exchange",
    "ValueCode": "power_of_two_code",
}
DEVICES = 'jax.config.update("jax_num_cpu_devices", 8)'  # tests have them already
FENCE = re.compile(r"^ *(`{3,}|:{3,}).*?^ *\1$", re.DOTALL | re.MULTILINE)
UNITS = r"%|[kMG]B|ms|points|times|seconds|minutes|hours"
FIGURE = re.compile(rf"(?<![\w./*-])(\d[\d,]*(?:\.\d+)?)(?= (?:{UNITS})\b| %|,? (?:and|to) [\d.,]+ (?:{UNITS}))")
NUMBER = re.compile(r"(?<![\w.])(\d[\d,]*(?:\.\d+)?)(?![\w-]|\.\d)")


def name_of(path):
    return str(path.relative_to(ROOT))


def code_of(page, language="python"):
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", [page for page in PAGES if code_of(page)], ids=name_of)
def test_code_of_a_page_runs_in_order(page, capsys):
    names = {}
    for block in code_of(page):
        exec(compile(block.replace(DEVICES, ""), name_of(page), "exec"), names)


@pytest.mark.parametrize("page", sorted(DOCS.glob("tutorials/*.md")), ids=name_of)
def test_code_of_a_tutorial_compiles(page):
    """`make docs` runs it."""
    cells = re.findall(r"^```\{code-cell\} ipython3\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    assert cells
    for cell in cells:
        compile(re.sub(r"^(:tags:.*|%.*)$", "", cell, flags=re.MULTILINE), name_of(page), "exec")


def public_names(module):
    return module.__all__ if hasattr(module, "__all__") else own_functions(module)


def own_functions(module):
    return [name for name, x in vars(module).items() if inspect.isfunction(x) and x.__module__ == module.__name__]


@pytest.mark.parametrize("page", MODULES)
def test_every_public_name_is_in_the_reference(page):
    module = MODULES[page]
    listed = re.findall(r"^   ([\w.]+)$", (DOCS / f"api/{page}.rst").read_text(), re.MULTILINE)
    found = [getattr(gcjax if name.startswith("gcjax.") else module, name.removeprefix("gcjax.")) for name in listed]
    names = [name for name in public_names(module) if not name.startswith("_")]
    objects = [getattr(module, name) for name in names if not inspect.ismodule(getattr(module, name))]
    assert [x for x in objects if not any(x is y for y in found)] == []
    assert len(found) == len(objects)


@pytest.mark.parametrize("page", ["gcjax", "contrib", "gossip", "flax"])
def test_every_function_states_its_arguments(page):
    for name in public_names(MODULES[page]):
        x = getattr(MODULES[page], name)
        if not inspect.isfunction(x) or name.startswith("_"):
            continue
        text = inspect.getdoc(x)
        assert page == "gossip" or "Args:" in text, name
        assert ":math:" not in text, f"{name}: write formulas as plain text, which help() shows"


@pytest.mark.parametrize("page", MODULES)
def test_every_function_and_class_has_a_doctest(page):
    """`Reset` and `TakeIn` are types of functions; users write none, and their defaults have examples."""
    module = MODULES[page]
    public = {name: getattr(module, name) for name in public_names(module) if not name.startswith("_")}
    public = {name: x for name, x in public.items() if inspect.isfunction(x) or inspect.isclass(x)}
    bare = {name for name, x in public.items() if not has_doctest(x)}
    shown = {name for name, by in SHOWN_BY.items() if has_doctest(getattr(module, by, None))}
    assert bare - shown - TOO_LONG == set()
    stale = (SHOWN_BY.keys() | TOO_LONG) & public.keys() - bare
    assert stale == set(), "they have doctests of their own"


def has_doctest(x):
    return bool(doctest.DocTestParser().get_examples(x.__doc__ or ""))


def test_messages_of_the_traps_are_those_of_the_sources():
    sources = "\n".join(path.read_text() for path in (ROOT / "gcjax").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", sources)  # long messages stand on several lines
    _, _, table = (DOCS / "traps.md").read_text().partition("## Which message means what?")
    messages = re.findall(r'^\| "(.*?)" \|', table, re.MULTILINE)
    assert len(messages) > 15
    assert [m for m in messages if not all(part.strip() in joined for part in m.split("..."))] == []


def test_table_of_methods_is_current():
    text = readme_table.PAGE.read_text()
    assert text.count(readme_table.BEGIN) == text.count(readme_table.END) == 1
    assert readme_table.with_table(text) == text, "run python tests/support/readme_table.py"


@pytest.mark.parametrize("page", [*TEXT, ROOT / "bench/results/training.md", ROOT / "CONTRIBUTING.md"], ids=name_of)
def test_links_lead_to_files_and_headings(page):
    dead = []
    for link in re.findall(r"(?<!!)\]\(<?(?!https?:)([^)>\s]*)>?\)", FENCE.sub("", page.read_text())):
        path, _, heading = link.partition("#")
        target = page if not path else page.parent / path
        if not target.exists() or (heading and heading not in anchors(target)):
            dead.append(link)
    assert dead == []


def anchors(page):
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_a_table_of_contents():
    trees = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(), re.DOTALL)
    entries = {line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")}
    assert all((DOCS / entry).with_suffix(suffix_of(DOCS / entry)).exists() for entry in entries)
    assert {str(page.relative_to(DOCS).with_suffix("")) for page in PAGES} - entries == {"index"}


def suffix_of(path):
    return ".md" if path.with_suffix(".md").exists() else ".rst"


def blocks_of(text):
    """Paragraphs, lists and tables outside of code, each with the comment that says where its figures are from."""
    return [block for block in re.split(r"\n\s*\n", FENCE.sub("", text)) if not block.startswith("#")]


def values_in(text):
    return [(number, float(number.replace(",", ""))) for number in NUMBER.findall(text)]


@pytest.mark.parametrize("page", TEXT, ids=name_of)
def test_figures_come_from_result_files(page):
    """A paragraph with a measured figure names the files that have all its numbers: `<!-- figures: FILE ... -->`.

    A number may be rounded. If a file is older than the sources, the paragraph says so. `fixed` in place of files: no
    measurements, but constants of the code or an example.
    """
    for block in blocks_of(page.read_text()):
        source, _, text = block.partition("-->") if block.startswith("<!-- figures: ") else ("", "", block)
        files = source.removeprefix("<!-- figures: ").split()
        if not files:
            assert not FIGURE.search(text), f"where from? {block}"
        elif files != ["fixed"]:
            known = [value for file in files for _, value in values_in((ROOT / file).read_text())]
            missing = [number for number, value in values_in(prose(text)) if not is_rounded(number, value, known)]
            assert missing == [], block
            if any("Measured on an earlier version" in (ROOT / file).read_text() for file in files):
                assert "earlier version" in " ".join(text.split()), f"not of today's sources: {block}"


def prose(text):
    """Without code and the targets of links."""
    return re.sub(r"`[^`]*`|\]\([^)]*\)|[A-Z]+-10\b", "", text)


def is_rounded(number, value, known):
    digits = len(number.partition(".")[2])
    return any(abs(value - other) <= 0.5 * 10**-digits + 1e-9 for other in known)
