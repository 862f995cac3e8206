"""Color scales computed in Oklab, a space in which equal distances look equally large."""

from __future__ import annotations

import math

__all__ = ["classes", "diverging", "lines", "sequential"]

STEPS = 33


def sequential(dark: bool = False) -> list[str]:
    """Scale from pale yellow through green to dark blue: more ink means more.

    Lightness falls in equal steps, so the order of the colors survives color blindness and a gray printer. On a dark
    page the scale runs the other way.

    Example:
        >>> sequential()[0], sequential()[-1]
        ('#f7f1bb', '#27205a')
    """
    steps = [i / (STEPS - 1) for i in range(STEPS)]
    # The bulge keeps the middle vivid; both ends must stay pale, because sRGB has no vivid colors there.
    colors = [_oklch(0.95 - 0.66 * t, 0.07 + 0.055 * math.sin(math.pi * t) + 0.03 * t, 103 + 180 * t) for t in steps]
    return colors[::-1] if dark else colors


def diverging(dark: bool = False) -> list[str]:
    """Orange below the neutral value, blue above it, and nearly white in the middle.

    Example:
        >>> diverging()[16]
        '#f2f2f2'
    """
    middle, end = (0.30, 0.80) if dark else (0.961, 0.42)

    def side(hue: float, chroma: float) -> list[str]:
        shares = [i / (STEPS // 2) for i in range(STEPS // 2 + 1)]
        return [_oklch(middle + (end - middle) * t, chroma * math.sin(math.pi / 2 * t), hue) for t in shares]

    return side(50, 0.115)[:0:-1] + side(255, 0.125)


def classes(dark: bool = False) -> list[str]:
    """Four colors of the sequential scale, for the classes I to IV: the fewer tokens, the more ink."""
    scale = sequential(dark)
    return [scale[round(t * (STEPS - 1))] for t in (0.06, 0.34, 0.62, 0.92)]


def lines(dark: bool = False) -> list[str]:
    """Eight colors for lines; neighbors differ in lightness too, for color-blind readers."""
    lightness = 0.76 if dark else 0.52
    return [
        _oklch(lightness, 0.12, 255),
        _oklch(lightness + 0.06, 0.125, 55),
        _oklch(lightness, 0.105, 165),
        _oklch(lightness, 0.13, 345),
        _oklch(lightness + 0.10, 0.115, 95),
        _oklch(lightness + 0.06, 0.095, 220),
        _oklch(lightness - 0.08, 0.14, 290),
        _oklch(lightness - 0.10, 0.02, 255),
    ]


def _oklch(lightness: float, chroma: float, hue: float) -> str:
    """Return the sRGB color of an Oklch color; outside the gamut of sRGB the chroma is reduced, not the lightness.

    Source:
        Ottosson 2020, "A perceptual color space for image processing".
    """
    while True:
        channels = _linear_rgb(lightness, chroma, hue)
        if all(-1e-4 <= channel <= 1.0001 for channel in channels) or chroma <= 0:
            return "#" + "".join(f"{round(255 * _companded(channel)):02x}" for channel in channels)
        chroma -= 0.002


def _linear_rgb(lightness: float, chroma: float, hue: float) -> tuple[float, float, float]:
    a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
    long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
    medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
    short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
    return (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )


def _companded(channel: float) -> float:
    channel = min(max(channel, 0.0), 1.0)
    return 12.92 * channel if channel <= 0.0031308 else 1.055 * channel ** (1 / 2.4) - 0.055
