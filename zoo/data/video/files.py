"""Video files, through PyAV (the libraries of FFmpeg)."""

from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zoo.data.sources import Unreadable
from zoo.train.record import replacing

VIDEO_FILES = (".mp4", ".mov", ".mkv", ".webm", ".avi")


class About(NamedTuple):
    """What a file says of its first video stream, as it is stored; frames is exact, counted where the file does not say
    it."""

    frames: int
    height: int
    width: int
    fps: float


def about(file: str | Path) -> About:
    """Size of a video. Raises Unreadable."""
    with _Opened(file) as (container, stream):
        frames = stream.frames or sum(1 for _ in container.decode(stream))
        codec = stream.codec_context
        return About(frames, codec.height, codec.width, float(stream.average_rate or 0))


def read_frames(file: str | Path, numbers: Iterable[int]) -> np.ndarray:
    """The frames with these numbers (from 0, growing), uint8 [T, H, W, 3]. Raises Unreadable if one is not there.

    Frames are counted from the start of the file, so that no key frame or time stamp can shift them, and turned as the
    file says.
    """
    wanted = list(numbers)
    found: list[np.ndarray] = []
    with _Opened(file) as (container, stream):
        for number, frame in enumerate(container.decode(stream)):
            if number == wanted[len(found)]:
                found.append(_upright(frame))
                if len(found) == len(wanted):
                    return np.stack(found)
    raise Unreadable(f"{file} ends before its frame {wanted[len(found)]}")


def _upright(frame: Any) -> np.ndarray:
    """[H, W, 3] as players show it: phones store portraits lying, with a note by how much to turn them."""
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))  # both counter-clockwise


def read_video(file: str | Path) -> np.ndarray:
    """Every frame, uint8 [T, H, W, 3]. Raises Unreadable."""
    return read_frames(file, range(about(file).frames))


def write_video(frames: np.ndarray, file: Path, fps: float) -> None:
    """Write uint8 frames [T, H, W, 3] as H.264 in an mp4 file, complete or not at all.

    H.264 in 4:2:0 needs even sides: an odd one gets a copy of its last line.
    """
    av = _av()
    odd = frames.shape[1] % 2, frames.shape[2] % 2
    frames = np.pad(frames, [(0, 0), (0, odd[0]), (0, odd[1]), (0, 0)], mode="edge")
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary, av.open(str(temporary), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        stream.options = {"crf": "16"}
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")):
                container.mux(packet)
        for packet in stream.encode(None):
            container.mux(packet)


class _Opened:
    """Context: (container, first video stream) of a file, decoded with several threads; errors become Unreadable."""

    def __init__(self, file: str | Path) -> None:
        self.file = file

    def __enter__(self) -> tuple[Any, Any]:
        av = _av()
        try:
            self.container = av.open(str(self.file))
        except (av.FFmpegError, OSError) as error:
            raise Unreadable(f"{self.file}: {error}") from error
        if not self.container.streams.video:
            self.container.close()
            raise Unreadable(f"{self.file} has no pictures")
        stream = self.container.streams.video[0]
        stream.thread_type = "AUTO"
        return self.container, stream

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.container.close()
        if kind is not None and issubclass(kind, _av().FFmpegError):
            raise Unreadable(f"{self.file}: {error}") from error


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need the package av: pip install 'hla-zoo[video]'") from error
    return av
