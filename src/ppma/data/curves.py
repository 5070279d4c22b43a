"""Winding curves of one pixel that touch neither each other nor themselves, for `ppma.data.regions`."""

import numpy as np

_STEPS = ((0, 1), (1, 0), (0, -1), (-1, 0))  # clockwise, so that neighbours in the list are turns
_AROUND = [(i, j) for i in (-1, 0, 1) for j in (-1, 0, 1) if i or j]

Cell = tuple[int, int]


def draw_curves(generator: np.random.Generator, size: int, curves: int, length: int, turns: float) -> np.ndarray:
    """Draw curves, each from a random pixel on until it is long enough or has no room.

    Args:
        generator: source of randomness.
        size: side of the grid.
        curves: number of curves; fewer where the grid is full.
        length: pixels of the longest curve.
        turns: probability of a turn at each pixel.

    Returns:
        The number of the curve of every pixel, (size, size); -1 elsewhere.
    """
    owner: dict[Cell, int] = {}

    def free(cell: Cell, allowed: tuple[Cell, ...] = ()) -> bool:
        i, j = cell
        inside = 0 <= i < size and 0 <= j < size and cell not in owner
        return inside and not any((i + a, j + b) in owner and (i + a, j + b) not in allowed for a, b in _AROUND)

    for number in range(curves):
        places = (divmod(int(place), size) for place in generator.permutation(size * size))
        start = next((cell for cell in places if free(cell)), None)
        if start is None:
            break
        owner[start] = number
        path, heading = [start], int(generator.integers(4))
        while len(path) < length:
            side = 1 if generator.random() < 0.5 else 3
            order = [heading, heading + side, heading - side]
            if generator.random() < turns:
                order = [*order[1:], heading]
            ahead = [(way % 4, (path[-1][0] + _STEPS[way % 4][0], path[-1][1] + _STEPS[way % 4][1])) for way in order]
            chosen = next(((way, cell) for way, cell in ahead if free(cell, tuple(path[-2:]))), None)
            if chosen is None:
                break
            heading, cell = chosen
            owner[cell] = number
            path.append(cell)
    drawn = np.full((size, size), -1)
    for cell, number in owner.items():
        drawn[cell] = number
    return drawn
