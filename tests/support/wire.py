"""Which collectives of a compiled program run along some axes of a mesh."""

import numpy as np


def along(found, mesh, axes):
    """Those collectives whose groups are the rows of devices along `axes`."""
    numbers = np.arange(mesh.size).reshape(list(mesh.shape.values()))
    last = [list(mesh.shape).index(axis) for axis in axes]
    rows = np.moveaxis(numbers, last, range(-len(last), 0)).reshape(-1, np.prod([mesh.shape[axis] for axis in axes]))
    wanted = {frozenset(row) for row in rows.tolist()}
    return [collective for collective in found if collective.groups == wanted]
