"""Colours as readers see them: WCAG 2.1's contrast, and CIEDE2000 for readers who are colour-blind.

They are simulated as Machado, Oliveira and Fernandes (2009) do. The matrices are those of the paper's table for the greatest
severity; they act on linear sRGB.
"""

from __future__ import annotations

import numpy as np

SIMULATED = {
    "none": np.eye(3),
    "protanopia": np.array([[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array([[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]),
}
TO_XYZ = np.array([[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.0721750], [0.0193339, 0.1191920, 0.9503041]])
WHITE = TO_XYZ.sum(axis=1)


def linear(color: str) -> np.ndarray:
    """`#rrggbb` as linear sRGB, 0 to 1."""
    values = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def contrast(one: str, other: str) -> float:
    """The contrast ratio of WCAG 2.1, 1 to 21."""
    low, high = sorted(float(TO_XYZ[1] @ linear(color)) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def least_difference(one: str, other: str) -> float:
    """CIEDE2000 between two colours for the reader who tells them apart the least."""
    return min(ciede2000(lab(view @ linear(one)), lab(view @ linear(other))) for view in SIMULATED.values())


def lab(rgb: np.ndarray) -> np.ndarray:
    """Linear sRGB as CIELAB under D65."""
    share = TO_XYZ @ np.clip(rgb, 0, 1) / WHITE
    x, y, z = np.where(share > (6 / 29) ** 3, np.cbrt(share), share / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def ciede2000(one: np.ndarray, other: np.ndarray) -> float:
    """The difference of two CIELAB colours, by the formula of ISO/CIE 11664-6."""
    chroma = (np.hypot(*one[1:]) + np.hypot(*other[1:])) / 2
    stretch = 1.5 - 0.5 * np.sqrt(chroma**7 / (chroma**7 + 25**7))
    (l1, a1, b1), (l2, a2, b2) = one * [1, stretch, 1], other * [1, stretch, 1]
    c1, c2 = np.hypot(a1, b1), np.hypot(a2, b2)
    h1, h2 = np.degrees(np.arctan2([b1, b2], [a1, a2])) % 360
    apart = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    lightness, chroma = (l1 + l2) / 2, (c1 + c2) / 2
    hue = h1 + h2 if c1 * c2 == 0 else (h1 + apart / 2) % 360
    waves = ((-0.17, 1, -30), (0.24, 2, 0), (0.32, 3, 6), (-0.2, 4, -63))
    t = 1 + sum(size * np.cos(np.radians(times * hue + turn)) for size, times, turn in waves)
    in_l = (l2 - l1) / (1 + 0.015 * (lightness - 50) ** 2 / np.sqrt(20 + (lightness - 50) ** 2))
    in_c = (c2 - c1) / (1 + 0.045 * chroma)
    in_h = 2 * np.sqrt(c1 * c2) * np.sin(np.radians(apart / 2)) / (1 + 0.015 * chroma * t)
    turned = 2 * np.sqrt(chroma**7 / (chroma**7 + 25**7)) * np.sin(np.radians(60 * np.exp(-(((hue - 275) / 25) ** 2))))
    return float(np.sqrt(in_l**2 + in_c**2 + in_h**2 - turned * in_c * in_h))
