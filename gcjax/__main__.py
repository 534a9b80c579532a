"""The command line: `plan` predicts whether compression pays, `selfcheck` checks the laws on the devices here."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import jax

import gcjax
from gcjax._selfcheck import selfcheck
from gcjax._units import as_count

SHOWN = 6  # methods in the plot, beside the dense mean


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
      arguments: of the command line; None for those of this process.

    Returns:
      The exit status: 0; 1 if a law does not hold; 2 for bad arguments.
    """
    parser = _parser()
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    if args.command == "selfcheck":
        return _selfcheck(args.devices)
    try:
        print(_predicted(args))
    except (ValueError, ImportError, OSError) as error:
        print(f"python -m gcjax plan: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gcjax", description="Gradient compression for JAX.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    add = commands.add_parser("plan", help="predict the time of a training step with every method")
    add.description = "Predicts the time of a training step with every method; see help(gcjax.plan) for the model."
    add.add_argument("--params", required=True, metavar="N", help="parameters of the model, such as 25.6M")
    add.add_argument("--workers", required=True, metavar="P", help="data-parallel workers")
    add.add_argument("--link", required=True, metavar="SPEED", help="of each worker or host, such as 1Gbit or 50GB/s")
    add.add_argument("--step-time", required=True, metavar="TIME", help="a step without any exchange, such as 0.3s")
    add.add_argument("--latency", default="50us", metavar="TIME", help="of an empty message (default 50us)")
    add.add_argument("--density", default="1/100", metavar="SHARE", help="sent by sparse methods (default 1/100)")
    add.add_argument("--inner-workers", default="1", metavar="Q", help="workers on each host (default 1)")
    add.add_argument("--inner-link", metavar="SPEED", help="between the workers of a host, such as 300Gbit")
    add.add_argument(
        "--methods", nargs="+", metavar="NAME", help="compare these only, such as variance 'power_sgd rank 2'"
    )
    add.add_argument("--measure", action="store_true", help="measure the methods on this device again")
    add.add_argument("--plot", metavar="FILE", help="draw the step's time against the speed of the link")
    add = commands.add_parser("selfcheck", help="check the methods on the devices at hand, in about a minute")
    add.description = (
        "Runs some methods on all devices: are the updates bit-equal on all workers, is nothing lost, does the "
        "compiled program move the bytes that gcjax.info reports, and is nothing of the gradient's size all-reduced?"
    )
    add.add_argument("--devices", type=int, metavar="N", help="on CPUs, number of virtual devices (default 8)")
    return parser


def _selfcheck(devices: int | None) -> int:
    if devices is not None and devices < 1:
        print(f"--devices must be at least 1, got {devices}", file=sys.stderr)
        return 2
    with contextlib.suppress(RuntimeError):  # called from a program in which JAX has started: as many as there are
        jax.config.update("jax_num_cpu_devices", devices or 8)
    there = jax.device_count()
    if devices is not None and there != devices:
        print(f"--devices {devices}: there are {there} {jax.default_backend()} devices", file=sys.stderr)
        return 2
    if there < 2:
        print("one device only: nothing is exchanged, so there is nothing to check", file=sys.stderr)
        return 2
    print(f"jax {jax.__version__}, gcjax {gcjax.__version__}, {there} x {jax.devices()[0].device_kind}")
    checked = failed = 0
    for check in selfcheck(jax.make_mesh((there,), ("data",))):
        found = f" ({check.found})" if check.found else ""
        print(f"{'holds' if check.holds else 'FAILS'}  {check.method}: {check.law}{found}", flush=True)
        checked, failed = checked + 1, failed + (not check.holds)
    report = "; please report it, with all of this output" if failed else ""
    print(f"{checked} laws checked, {failed} failed{report}")
    return int(failed > 0)


def _predicted(args: argparse.Namespace) -> gcjax.Plan:
    figure = _figure() if args.plot else None  # fail before anything takes time
    setting = {
        "workers": as_count("--workers", args.workers),
        "link": args.link,
        "step_time": args.step_time,
        "latency": args.latency,
        "density": _share(args.density),
        "inner_workers": as_count("--inner-workers", args.inner_workers),
        "inner_link": args.inner_link,
        "methods": args.methods,
    }
    if args.measure:
        gcjax.measure_costs(_show)
    found = gcjax.plan(args.params, **setting, progress=_show)
    if figure:
        _draw(found, figure)
        figure.savefig(args.plot, dpi=120)
    return found


def _share(text: str) -> float:
    try:
        return float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        raise ValueError(f"--density must be a share such as 1/100 or 0.01, got {text!r}") from None


def _show(done: int, count: int, name: str) -> None:
    print(f"measuring {done + 1} of {count} on this device, once: {name}", file=sys.stderr)


def _figure() -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install matplotlib") from error
    return Figure(figsize=(8, 5), layout="constrained")


def _draw(found: gcjax.Plan, figure: Any) -> None:
    """Plot the seconds of a step against the speed of the link, up to a factor of 100 either way."""
    axes, setting, dense = figure.subplots(), found.setting, found.dense
    here = setting.link.bits_per_second
    rates = [here * 10 ** (k / 10) for k in range(-20, 21)]
    steps = [{row.method: row.step for row in found.at(rate).rows} for rate in rates]
    others = [row.method for row in found.rows if row is not dense]
    for method in [dense.method, *others[:SHOWN]]:
        style = {"color": "black", "linewidth": 2} if method == dense.method else {}
        axes.loglog([rate / 1e9 for rate in rates], [at_rate[method] for at_rate in steps], label=method, **style)
    axes.axvline(here / 1e9, color="grey", linestyle=":")
    axes.axhline(setting.step_time, color="grey", linestyle="--", label="without exchange")
    axes.set(xlabel="link, Gbit/s", ylabel="predicted step, s")
    axes.set_title(f"{setting.parameters:,} parameters, {setting.workers:,} workers")
    axes.legend()


if __name__ == "__main__":
    sys.exit(main())
