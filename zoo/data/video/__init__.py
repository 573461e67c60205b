"""Videos: reading and writing of files, clips cut from them, and the data set of moving digits."""

from zoo.data.video.clips import Clips, ClipShape
from zoo.data.video.digits import MovingDigits
from zoo.data.video.files import read_frames, write_video

__all__ = ["ClipShape", "Clips", "MovingDigits", "read_frames", "write_video"]
