"""Every method compiles for TPUs and GPUs, and the program adds up no more than the method is meant to.

Nothing runs. A child process for each target compiles all cases, in an environment with the target's compiler: the
first run downloads more than 2 GB. Run by `make accelerators-test`, not by `make test`.
"""

import json
import subprocess
from pathlib import Path

import cases
import optax
import pytest

import gcjax
from bench.accelerators import environments, hlo
from bench.machine import ROOT
from gcjax._hlo import replica_groups
from gcjax._table import METHODS

TARGETS = ("tpu", "gpu")
HOST = 4  # workers on one; numbered in the order of the mesh


class Child:
    """A process that compiles all cases of a target, one after the other."""

    def __init__(self, target: str, folder: Path) -> None:
        self.folder, self.found = folder, {}
        command = [str(environments.interpreter(target)), cases.__file__, target, str(folder)]
        with (folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=ROOT, env=environments.variables(target)
            )

    def result(self, name: str, mesh: str) -> dict:
        """What the process printed about a case; waits for it."""
        while (name, mesh) not in self.found:
            line = self.process.stdout.readline()
            if not line:
                code = self.process.wait()
                pytest.fail(f"the compiling process ended with {code}:\n{(self.folder / 'stderr').read_text()[-3000:]}")
            found = json.loads(line)
            self.found[found["name"], found["mesh"]] = found
        return self.found[name, mesh]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()


@pytest.fixture(scope="session")
def children(tmp_path_factory):
    """Target -> its process, or why there is none."""
    found = {}
    for target in TARGETS:
        try:
            found[target] = Child(target, tmp_path_factory.mktemp(target))
        except environments.Unavailable as error:
            found[target] = str(error)
    yield found
    for child in found.values():
        if isinstance(child, Child):
            child.close()


@pytest.fixture
def program(children):
    """program(target, name, mesh) -> the compiled program."""

    def get(target, name, mesh):
        child = children[target]
        if isinstance(child, str):
            pytest.skip(child)
        found = child.result(name, mesh)
        assert "error" not in found, found["error"]
        return hlo.parse(Path(found["text"]).read_text())

    return get


def reductions(program):
    """The instructions that add up values of the workers of a host, and those that do so between hosts."""
    within, between = [], []
    for instruction in (i for body in program.computations.values() for i in body):
        if instruction.opcode in ("all-reduce", "reduce-scatter"):
            hosts = [{worker // HOST for worker in group} for group in replica_groups(instruction.line)]
            (within if all(len(group) == 1 for group in hosts) else between).append(instruction)
    return within, between


def elements(instructions):
    return sum(instruction.elements for instruction in instructions)


def listed(instructions):
    return "added up:\n" + "\n".join(instruction.line.strip()[:160] for instruction in instructions)


@pytest.mark.accelerators
@pytest.mark.parametrize(("name", "mesh"), cases.PAIRS)
@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles_and_reduces_only_what_it_should(target, name, mesh, program):
    case = cases.CASES[name]
    within, between = reductions(program(target, name, mesh))
    assert elements(between) <= case.reduced + cases.SCALARS, listed(between)
    if mesh == "inner axis":  # the gradient, and its squares, are averaged over the inner workers
        assert elements(within) <= cases.ENTRIES * (1 + case.squares) + cases.SCALARS, listed(within)
    else:
        assert not within, listed(within)


@pytest.mark.accelerators
@pytest.mark.parametrize("target", TARGETS)
def test_a_dense_mean_is_seen(target, program):
    """Otherwise the test above could not fail."""
    assert elements(reductions(program(target, "dense", "two axes"))[1]) >= cases.ENTRIES
    assert elements(reductions(program(target, "top_k", "inner axis"))[0]) >= cases.ENTRIES


@pytest.mark.accelerators
@pytest.mark.parametrize("target", TARGETS)
def test_the_choice_between_old_and_new_state_copies_neither(target, program):
    """CPUs copy them: the new parameters read the old momentum, and no fusion there has two results."""
    bodies = program(target, "dense", "one axis").computations.values()
    copies = [i for body in bodies for i in body if i.opcode == "copy" and i.elements == 256 * 128]
    assert not copies, listed(copies)


def test_every_method_has_a_case():
    gossip = {
        name
        for name in gcjax.gossip.__all__
        if getattr(gcjax.gossip, name).__annotations__.get("return") is optax.GradientTransformationExtraArgs
    }
    assert len(gossip) >= 4
    assert {case.method for case in cases.CASES.values()} == gossip | set(METHODS)
