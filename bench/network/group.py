"""The parent's side: one process on every host of a network, all doing the same requests."""

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
from typing import NoReturn, Self

from bench import machine
from bench.network.links import Network

PATIENCE = 300  # seconds until a silent process counts as hanging
MARGIN = 0.004  # seconds between the request for a step and its start, for the request to arrive everywhere
SETTLE = 0.05  # seconds until the last acknowledgements have passed


class Group:
    """A context: one process on every host of a network."""

    def __init__(self, network: Network, hosts: int, command: list[str], malloc: str):
        self._errors = [tempfile.TemporaryFile("w+") for _ in range(hosts)]  # noqa: SIM115  closed by __exit__
        # The processes share the cores, so threads should not spin while they wait. GCJAX_NETWORK marks our children.
        settings = {"OMP_WAIT_POLICY": "PASSIVE", "TF_CPP_MIN_LOG_LEVEL": "2", "GCJAX_NETWORK": str(os.getpid())}
        variables = machine.environment(malloc, **settings)
        variables.pop("XLA_FLAGS", None)
        self.processes: list[subprocess.Popen] = []
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        try:
            for host, errors in enumerate(self._errors):
                inside = [*network.inside(host), *command]
                child = subprocess.Popen(
                    inside, env=variables, cwd=machine.ROOT, stderr=errors, start_new_session=True, **pipes
                )
                self.processes.append(child)
        except BaseException:
            self.__exit__()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()
            process.stdout.close()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        for errors in self._errors:
            errors.close()

    def ask(self, do: str, each: str | None = None, **request) -> list[dict]:
        """Send a request to all hosts and collect their answers. `each` names an argument that is the host's number."""
        for host, process in enumerate(self.processes):
            own = {each: host} if each else {}
            try:
                process.stdin.write(json.dumps({"do": do} | request | own) + "\n")
                process.stdin.flush()
            except BrokenPipeError:
                self._fail(do, request)
        answers: dict[int, dict] = {}
        with selectors.DefaultSelector() as waiting:
            for host, process in enumerate(self.processes):
                waiting.register(process.stdout, selectors.EVENT_READ, host)
            until = time.monotonic() + PATIENCE
            while len(answers) < len(self.processes):
                ready = waiting.select(until - time.monotonic())
                for key, _ in ready:
                    line = key.fileobj.readline()
                    if not line:
                        self._fail(do, request)
                    answers[key.data] = json.loads(line)
                    waiting.unregister(key.fileobj)
                if not ready and time.monotonic() > until:
                    self._fail(do, request)
        return [answers[host] for host in sorted(answers)]

    def _fail(self, do: str, request: dict) -> NoReturn:
        time.sleep(0.5)  # the first process to fail takes the others with it: let them write
        tails = []
        for errors in self._errors:
            errors.seek(0)
            tails.append("".join(errors.readlines()[-12:]))
        said = "\n--\n".join(tails)
        raise SystemExit(f"bench.network: the request `{do} {request}` failed or hangs. The hosts' last lines:\n{said}")

    def step(self, row: str, **request) -> float:
        """Seconds of one step, from the start common to all hosts until the last one has ended."""
        answers = self.ask("step", row=row, at=time.monotonic() + MARGIN, **request)
        return max(a["end"] for a in answers) - min(a["begin"] for a in answers)

    def counters(self) -> list[dict]:
        """The hosts' counters once the links are at rest."""
        time.sleep(SETTLE)
        return self.ask("counters")
