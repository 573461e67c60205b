"""Videos: mp4 files read and written, the clips that are cut out of them, and digits that move."""

from zoo.data.video.clips import Clips, ClipShape
from zoo.data.video.digits import MovingDigits
from zoo.data.video.files import read_frames, write_video

__all__ = ["ClipShape", "Clips", "MovingDigits", "read_frames", "write_video"]
