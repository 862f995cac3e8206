"""Small black and white drawings to store in a memory of polar states."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["drawings"]

ROWS = {
    "face": "..####..|.#....#.|#.#..#.#|#......#|#.#..#.#|#..##..#|.#....#.|..####..",
    "house": "...##...|..####..|.######.|########|.#....#.|.#.##.#.|.#.##.#.|.######.",
    "tree": "...##...|..####..|.######.|########|..####..|...##...|...##...|.######.",
    "boat": "....#...|....##..|....###.|....####|....#...|########|.######.|..####..",
    "cat": "#.....#.|##...##.|#######.|#.#.#.#.|#######.|.##.##.#|.######.|..#..#..",
    "key": ".###....|#...#...|#...#...|.###....|..#.....|..###...|..#.....|..####..",
    "cup": "........|######..|#....###|#....#.#|#....###|######..|.####...|########",
    "fish": "........|#...###.|##.#####|#####.##|########|##.#####|#...###.|........",
    "heart": ".##..##.|########|########|########|.######.|..####..|...##...|........",
    "stairs": "......##|......##|....####|....####|..######|..######|########|########",
}


def drawings() -> dict[str, Tensor]:
    """Return ten drawings of 8 by 8 pixels by name, ink 1 and paper -1, each of shape ``(64,)``.

    They resemble each other more than random states do: their mean overlap is 0.085 and the largest 0.69.

    Example:
        >>> for row in drawings()["face"].reshape(8, 8):
        ...     print("".join("#" if pixel > 0 else "." for pixel in row))
        ..####..
        .#....#.
        #.#..#.#
        #......#
        #.#..#.#
        #..##..#
        .#....#.
        ..####..
    """
    return {
        name: 2 * torch.tensor([mark == "#" for mark in rows.replace("|", "")]).double() - 1
        for name, rows in ROWS.items()
    }
