"""Moving digits: videos of a handwritten digit that moves on a black canvas and bounces off its edges.

Similar to Moving MNIST (Srivastava et al., arXiv 1502.04681), but with a single digit (from scikit-learn), so that a
clip has a class.
"""

import numpy as np
import torch
from torch import Tensor

from zoo.data.sources import Digits
from zoo.data.video.clips import ClipShape

SPEED = 0.06  # distance per frame, as a fraction of the canvas


class MovingDigits:
    """Clips of one moving digit each. Clip i depends only on `train`, i and the shape.

    train: whether to use the digits of the training set or of the validation set.  shape: shape of the clips.
    count: number of clips.
    """

    fps = 8.0

    def __init__(self, train: bool, shape: ClipShape, count: int) -> None:
        self.digits, self.shape, self.count, self.train = Digits(train), shape, count, train
        self.classes = self.digits.classes

    def __len__(self) -> int:
        return self.count

    def read(self, number: int) -> tuple[Tensor, int]:
        """Return the clip, uint8 [3, T, H, W], and its digit."""
        draws = np.random.default_rng((int(self.train), number))
        image, label = self.digits.read(int(draws.integers(len(self.digits))))
        height, width = self.shape.height, self.shape.width
        side = max(8, min(height, width) // 2)
        digit = np.asarray(image.resize((side, side)))
        room = np.array([height - side, width - side])
        angle = draws.uniform(0, 2 * np.pi)
        velocity = np.array([np.sin(angle), np.cos(angle)]) * SPEED * self.shape.stride * (height, width)
        place = draws.uniform(0, 1, 2) * room
        frames = np.zeros((self.shape.frames, height, width, 3), np.uint8)
        for frame in frames:
            top, left = (place.round().astype(int)).tolist()
            frame[top : top + side, left : left + side] = digit
            place, velocity = _bounce(place + velocity, velocity, room)
        return torch.from_numpy(frames).permute(3, 0, 1, 2).contiguous(), label


def _bounce(place: np.ndarray, velocity: np.ndarray, room: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reflect positions outside of [0, room] at the edge, and reverse their velocities."""
    velocity = np.where((place < 0) | (place > room), -velocity, velocity)
    place = np.where(place < 0, -place, np.where(place > room, 2 * room - place, place))
    return place.clip(0, room), velocity
