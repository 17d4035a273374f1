"""Pictures from whole-number arithmetic: the same everywhere, and smooth but for creases, like photographs."""

import numpy as np

PICTURES = {"wide": (21, 50), "tall": (70, 33), "large": (150, 90), "tiny": (7, 9), "fitting": (32, 24)}
"""(height, width) by name."""
VIDEOS = {"short": (5, 24, 40, 2.0), "long": (60, 30, 22, 10.0), "odd": (7, 12, 20, 4.0)}
"""(frames, height, width, frames per second) by name."""


def picture(height: int, width: int, turn: int = 0) -> np.ndarray:
    """uint8 [height, width, 3]: a folded ramp in each channel."""
    rows, columns = np.mgrid[:height, :width]
    ramps = [7 * rows + 3 * columns + 20 * turn, 2 * rows - 9 * columns + 31 * turn + 900, 5 * (rows + columns)]
    return np.stack([abs(ramp % 510 - 255) for ramp in ramps], axis=-1).astype(np.uint8)


def video(count: int, height: int, width: int) -> np.ndarray:
    """uint8 [count, height, width, 3]."""
    return np.stack([picture(height, width, turn) for turn in range(count)])
