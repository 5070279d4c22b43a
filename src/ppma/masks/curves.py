"""Orders in which a scan visits the tokens of a grid."""

from functools import lru_cache

Vector = tuple[int, int]


def row_major(height: int, width: int) -> tuple[int, ...]:
    """Row after row: the raster order itself."""
    return tuple(range(height * width))


def transposed(order: tuple[int, ...], height: int, width: int) -> tuple[int, ...]:
    """An order of the (width, height) grid, as an order of the (height, width) grid with the axes swapped."""
    return tuple((token % height) * width + token // height for token in order)


def column_major(height: int, width: int) -> tuple[int, ...]:
    """Column after column."""
    return transposed(row_major(width, height), height, width)


@lru_cache(maxsize=64)
def hilbert(height: int, width: int) -> tuple[int, ...]:
    """A generalised Hilbert curve over any grid, as raster indices in the order of the visit.

    Consecutive tokens are neighbours; where both extents are such that this cannot be (an odd extent against an even
    one), a single step of the curve is diagonal.
    """
    across, down = (0, width), (height, 0)
    cells = _hilbert((0, 0), across, down) if width >= height else _hilbert((0, 0), down, across)
    return tuple(i * width + j for i, j in cells)


def _add(*vectors: Vector) -> Vector:
    return sum(v[0] for v in vectors), sum(v[1] for v in vectors)


def _negative(v: Vector) -> Vector:
    return -v[0], -v[1]


def _length(v: Vector) -> int:
    return abs(v[0]) + abs(v[1])


def _unit(v: Vector) -> Vector:
    n = _length(v)
    return v[0] // n, v[1] // n


def _half(v: Vector) -> Vector:
    """About half of v, of even length where it can be, so that the halves of a curve meet at neighbours."""
    n = _length(v)
    half = n // 2
    if half % 2 == 1 and n > 2:
        half += 1
    u = _unit(v)
    return u[0] * half, u[1] * half


def _hilbert(start: Vector, main: Vector, side: Vector) -> list[Vector]:
    """Visit the rectangle spanned by `main` and `side` from `start`, ending at the far end of `main`."""
    if _length(side) == 1 or _length(main) == 1:
        along = main if _length(side) == 1 else side
        u = _unit(along)
        return [_add(start, (u[0] * step, u[1] * step)) for step in range(_length(along))]
    if 2 * _length(main) > 3 * _length(side):  # too long for a U: two curves one behind the other
        first = _half(main)
        rest = _add(main, _negative(first))
        return _hilbert(start, first, side) + _hilbert(_add(start, first), rest, side)
    # The U of Hilbert's curve: out along `side`, across along `main`, and back.
    near, half_main = _half(side), _unit(main)
    half_length = _length(main) // 2
    half_main = half_main[0] * half_length, half_main[1] * half_length
    back = _add(start, main, _negative(_unit(main)), near, _negative(_unit(side)))
    return (
        _hilbert(start, near, half_main)
        + _hilbert(_add(start, near), main, _add(side, _negative(near)))
        + _hilbert(back, _negative(near), _negative(_add(main, _negative(half_main))))
    )
