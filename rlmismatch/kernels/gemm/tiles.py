"""Which tile computes a product: a fixed table, measured on an H200.

A tile decides where an element is computed, never what is added to what. That tensor cores keep to it is a fact about the card, which
tests/gpu proves again for every tile below.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
PROGRAMS = 132  # of a persistent launch: the multiprocessors of an H100 or H200 SXM
GROUP = 8  # row tiles that share one column tile's operand in L2


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What one program computes at a time: `m` rows by `n` + `extra` columns, `k` terms of the sum in a step."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    extra: int = 0  # a second block of columns, or of rows where they are swapped: widths between two powers of two
    swapped: bool = False  # the weight's rows are the tile's rows: a tensor core takes no fewer than 64 of them
    count: int = 1  # chunks of a row-parallel sum that one program computes and joins


@dataclass(frozen=True, kw_only=True)
class Ring:
    """How `triton_hopper` computes: `groups` warp groups of 64 rows by `n` + `extra` columns each, `stages` blocks of `k` terms ahead."""

    groups: int
    n: int
    k: int
    stages: int
    extra: int = 0


@dataclass(frozen=True, kw_only=True)
class _Wave:
    tile: Tile
    cost: float  # microseconds that PROGRAMS such tiles take for 1000 terms


INTERPRETER = Tile(m=64, n=128, k=128, warps=4, stages=1)  # never another: there BLAS multiplies, and promises nothing about its order

_FEW_ROWS = Tile(m=64, n=16, k=256, warps=4, stages=5, swapped=True)
_FEW_SWAPPED = Tile(m=64, n=32, k=256, warps=4, stages=4, swapped=True)
# (columns that fill the card once, (largest M, tile)) for 17 to 64 rows, where reading the weight is all there is to do. Tiles that
# are not swapped load 64 rows, and what reaches far beyond the last one is slow.
_DECODE = (
    (32 * PROGRAMS, ((55, _FEW_SWAPPED), (64, Tile(m=64, n=32, k=256, warps=4, stages=4)))),
    (
        64 * PROGRAMS,
        (
            (32, _FEW_SWAPPED),
            (47, Tile(m=64, n=32, extra=32, k=128, warps=4, stages=6, swapped=True)),
            (64, Tile(m=64, n=64, k=128, warps=4, stages=6)),
        ),
    ),
    (None, ((32, _FEW_SWAPPED), (64, Tile(m=64, n=128, extra=64, k=128, warps=4, stages=3)))),
)
_MANY_ROWS = (
    _Wave(tile=Tile(m=64, n=128, k=128, warps=4, stages=4), cost=3.5),
    _Wave(tile=Tile(m=64, n=128, extra=64, k=64, warps=4, stages=6), cost=5.4),
    _Wave(tile=Tile(m=128, n=128, k=64, warps=8, stages=6), cost=5.9),
    _Wave(tile=Tile(m=128, n=256, k=64, warps=8, stages=3), cost=10.6),
)
# (largest M, tile) of a row-parallel sum of few rows
_CHUNKED = (
    (16, Tile(m=64, n=16, k=256, warps=4, stages=4, swapped=True, count=8)),
    (32, Tile(m=64, n=32, k=128, warps=4, stages=5, swapped=True, count=4)),
    (None, Tile(m=64, n=64, k=128, warps=4, stages=5, count=4)),
)
_RING_K = 64
# (tile, microseconds that PROGRAMS such tiles take for 1000 terms) of more than _FEW rows: of a row-parallel sum, and of one sum
_RINGS = (
    (Ring(groups=1, n=128, k=_RING_K, stages=8), 3.4),
    (Ring(groups=2, n=128, k=_RING_K, stages=5), 6.6),
)
_RINGS_OF_ONE = (
    (Ring(groups=1, n=128, k=_RING_K, stages=8), 3.4),
    (Ring(groups=1, n=128, extra=64, k=_RING_K, stages=6), 4.8),
    (Ring(groups=2, n=128, k=_RING_K, stages=6), 6.2),
)
_MOST_WAVES = 200  # of one sum: 4096 rows of a head of 151936 columns take 288
_FEW = 64
# By bytes of an operand element, through pointers. Float32 operands take the FMA units, where larger tiles spill.
_POINTER = {
    2: (
        (16, Tile(m=16, n=64, k=256, warps=4, stages=4)),
        (64, Tile(m=64, n=64, k=128, warps=4, stages=3)),
        (None, Tile(m=128, n=128, k=64, warps=4, stages=3)),
    ),
    4: (
        (16, Tile(m=16, n=64, k=64, warps=4, stages=3)),
        (None, Tile(m=64, n=64, k=32, warps=4, stages=3)),
    ),
}

DESCRIPTOR_TILES = tuple(
    dict.fromkeys((_FEW_ROWS, *(t for _, tiles in _DECODE for _, t in tiles), *(w.tile for w in _MANY_ROWS), *(t for _, t in _CHUNKED)))
)
RINGS = tuple(ring for ring, _ in _RINGS)
RINGS_OF_ONE = tuple(ring for ring, _ in _RINGS_OF_ONE)


def descriptor_tile(rows: int, columns: int, chunks: int) -> Tile:
    """The tile for operands that the tensor memory accelerator can load."""
    if chunks > 1:
        return _up_to(rows, _CHUNKED)
    if rows <= 16:
        return _FEW_ROWS
    if rows <= _FEW:
        return _up_to(rows, _up_to(columns, _DECODE))
    return min(_MANY_ROWS, key=lambda w: -(-_tiles(w.tile, rows, columns) // PROGRAMS) * w.cost).tile


def ring(rows: int, columns: int, width: int, chunks: int) -> Ring | None:
    """The tile of `triton_hopper` for `chunks` chunks of `width` terms.

    None: few rows, a block would reach into the next chunk, or so many tiles that the widest tile of `descriptor_tile` is faster.
    """
    if rows <= _FEW or width < _RING_K or (chunks > 1 and width % _RING_K):
        return None

    def waves(ring: Ring) -> int:
        return -(-(-(-rows // (64 * ring.groups)) * -(-columns // (ring.n + ring.extra))) // PROGRAMS)

    best, _ = min(_RINGS if chunks > 1 else _RINGS_OF_ONE, key=lambda entry: waves(entry[0]) * entry[1])
    return best if chunks > 1 or waves(best) <= _MOST_WAVES else None


def pointer_tile(rows: int, element_bytes: int) -> Tile:
    """The tile for operands of any strides."""
    return _up_to(rows, _POINTER[element_bytes])


def _tiles(tile: Tile, rows: int, columns: int) -> int:
    return -(-rows // tile.m) * -(-columns // (tile.n + tile.extra))


def _up_to(size: int, table: tuple[tuple[int | None, T], ...]) -> T:
    return next(found for most, found in table if most is None or size <= most)
