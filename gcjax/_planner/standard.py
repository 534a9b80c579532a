"""The methods that the planner compares unless told otherwise."""

from collections.abc import Callable

import optax

from gcjax._planner.measuring import Method
from gcjax._table import METHODS, Setting, Workload


def standard_methods(density: float) -> dict[str, Method]:
    """The settings of all public methods, by the labels under which their costs are kept."""

    def maker(setting: Setting) -> Callable[[int], optax.GradientTransformationExtraArgs]:
        return lambda parameters: setting(Workload(density, parameters))

    return {
        label: Method(maker(setting), sparse=row.sparse, squares=row.squares)
        for row in METHODS.values()
        for label, setting in row.settings.items()
    }
