"""Frames of tokens that are single atoms: from the geometry of the reference pose."""

import numpy as np
import numpy.typing as npt

from bevatron.typing import Array

NO_FRAME = -1
"""Written for each of the three atoms of a token without a frame."""

MIN_ANGLE = 25.0
"""Degrees; three atoms closer to a line have no frame."""


def pose_frames(pose: Array) -> npt.NDArray[np.int32]:
    """Choose three atoms (a, b, c) for the frame of each atom b of a residue.

    a is the nearest other atom of the residue and c the second nearest; there is no frame if the
    angle a-b-c is within 25 degrees of 0 or 180, or if there are no two others (supplement of
    AlphaFold3, section 4.3.2).

    Parameters
    ----------
    pose : [n, 3]
        Reference positions, Å; NaN if unknown.

    Returns
    -------
    int32 [n, 3]
        Places in the residue, `NO_FRAME` where there is no frame.
    """
    number = len(pose)
    frames = np.full((number, 3), NO_FRAME, dtype=np.int32)
    if number < 3:
        return frames
    points = pose.astype(np.float64)
    distance = np.linalg.norm(points[:, None] - points[None], axis=-1)
    np.fill_diagonal(distance, np.inf)
    distance[np.isnan(distance)] = np.inf
    near = np.argsort(distance, axis=1, kind="stable")[:, :2]
    known = np.isfinite(np.take_along_axis(distance, near, axis=1)).all(axis=1)
    first, second = (points[near[:, side]] - points for side in (0, 1))
    cosine = np.einsum("nx,nx->n", first, second)
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine /= np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
        bent = np.abs(cosine) < np.cos(np.deg2rad(MIN_ANGLE))
    whole = known & bent
    frames[whole] = np.stack([near[:, 0], np.arange(number), near[:, 1]], axis=1)[whole]
    return frames
