"""Which cases of a test run: all of them by default, or those that `cases` chooses."""

from collections.abc import Callable

import pytest


def cases(names, values, default=None, *, short=None, ids=None, marks: Callable = lambda *case: ()):
    """`pytest.mark.parametrize`, with the marker `full` on what `make test` leaves out.

    A rule chooses cases: a function of a case's values, true for those that run; a number of cases, spread evenly over
    all; a tuple of rules, each of which chooses among those of the one before; or None for all.

    Args:
      names: as for `parametrize`.
      values: as for `parametrize`, without `pytest.param`.
      default: the rule for `make test`.
      short: the rule for `make test-short`, which chooses among those of `default`. The others get the marker `long`.
      ids: as for `parametrize`.
      marks: marks(*case) -> further marks of a case.
    """
    single = isinstance(names, str) and "," not in names
    every = [(value,) if single else tuple(value) for value in values]
    in_default = chosen(default, every, range(len(every)))
    in_short = chosen(short, every, in_default)
    params = []
    for i, case in enumerate(every):
        left_out = [pytest.mark.full] * (i not in in_default) + [pytest.mark.long] * (i not in in_short)
        params.append(pytest.param(*case, marks=[*marks(*case), *left_out]))
    return pytest.mark.parametrize(names, params, ids=ids)


def chosen(rule, every, among):
    """The numbers of the cases among these that the rule chooses.

    >>> chosen((lambda n: n > 1, 2), [(1,), (2,), (3,), (4,)], range(4))
    [1, 3]
    """
    if rule is None:
        return list(among)
    if isinstance(rule, tuple):
        for each in rule:
            among = chosen(each, every, among)
        return among
    if callable(rule):
        return [i for i in among if rule(*every[i])]
    last = len(among) - 1
    return sorted({among[round(k * last / max(rule - 1, 1))] for k in range(rule)})
