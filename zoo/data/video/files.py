"""Reading and writing of video files with PyAV (FFmpeg)."""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zoo.data.decoding import Unreadable
from zoo.files import replacing

if TYPE_CHECKING:
    from av import VideoFrame
    from av.container import InputContainer
    from av.video import VideoStream

VIDEO_FILES = (".mp4", ".mov", ".mkv", ".webm", ".avi")
# distances in seconds to seek back from the first requested frame, tried in turn: in an open group of pictures, frames
# shown before the key frame are stored after it, so that decoding may have to begin at an earlier key frame
SEEK_BACK_SECONDS = (0.0, 12.0, math.inf)


class VideoInfo(NamedTuple):
    """Metadata of the first video stream of a file, before rotation.

    frames: number of frames.  height, width: size in pixels.  fps: mean frame rate.
    """

    frames: int
    height: int
    width: int
    fps: float


def video_info(file: str | Path) -> VideoInfo:
    """Read the metadata of a video, from its header if possible, else by decoding it. Raises Unreadable."""
    with _opened(file) as (container, stream):
        codec, fps = stream.codec_context, _rate(stream, file)
        frames = (
            stream.frames or round(_seconds(container, stream) * fps) or sum(1 for _ in _decoded(container, stream))
        )
        return VideoInfo(frames, codec.height, codec.width, fps)


def read_frames(file: str | Path, numbers: Iterable[int], fps: float = 0.0) -> np.ndarray:
    """Read frames of a video, uint8 [T, H, W, 3], rotated as in players.

    numbers: frame numbers from 0, increasing; frame n is what a player shows n / fps seconds after the first frame.
    fps: frames per second; 0 for the mean rate of the video.

    Decoding begins at the key frame before the first number, so that reading all clips of a file costs about as much as
    reading the file. Raises Unreadable if the video ends before the last number.
    """
    wanted = list(numbers)
    for back in SEEK_BACK_SECONDS:
        with _opened(file) as (container, stream):
            rate = _rate(stream, file)
            found = _frames_at(container, stream, [n / (fps or rate) for n in wanted], rate, back)
        if found is not None:
            break
    assert found is not None  # the last attempt decodes from the start of the video
    if len(found) < len(wanted):
        raise Unreadable(f"{file} ends before its frame {wanted[len(found)]}")
    return np.stack(found)


def _frames_at(
    container: "InputContainer", stream: "VideoStream", times: list[float], rate: float, back: float
) -> list[np.ndarray] | None:
    """Decode the frames that a player shows at `times`, in seconds after the first frame.

    Decoding begins at the last key frame that is at least `back` seconds before the first time. Returns fewer frames if
    the video ends early, and None if decoding began too late for the first time.
    """
    found: list[np.ndarray] = []
    frames = iter(_decoded(container, stream))
    before = next(frames, None)
    if before is None:
        return found
    origin, midway = before.pts, times[0] - back > 1 / rate
    tick = stream.time_base or Fraction(1)
    if midway:
        if origin is None:
            return None
        container.seek(round((times[0] - back) / tick) + origin, stream=stream)
        frames, before = iter(_decoded(container, stream)), None
    clock, slack = 0.0, 0.25 / rate  # seconds; the slack allows for time stamps rounded to the time base of the file
    for number, frame in enumerate(frames, start=1):
        if frame.pts is None and midway:
            return None
        now = number / rate if origin is None or frame.pts is None else float((frame.pts - origin) * tick)
        while now > times[len(found)] + slack:
            if before is None:
                return None
            found.append(_upright(before))
            if len(found) == len(times):
                return found
        before, clock = frame, now
    while before is not None and len(found) < len(times) and times[len(found)] < clock + 1 / rate - slack:
        found.append(_upright(before))
    return found if before is not None else None


def _decoded(container: "InputContainer", stream: "VideoStream") -> "Iterator[VideoFrame]":
    """Decode the frames from the current position, in display order."""
    return container.decode(stream)


def _rate(stream: "VideoStream", file: str | Path) -> float:
    rate = stream.average_rate or stream.guessed_rate
    if not rate:
        raise Unreadable(f"{file} has no frame rate")
    return float(rate)


def _seconds(container: "InputContainer", stream: "VideoStream") -> float:
    """Duration in seconds from the header of the stream or the container; 0 if unknown."""
    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    return (container.duration or 0) / 1e6


def _upright(frame: "VideoFrame") -> np.ndarray:
    """Convert a frame to uint8 [H, W, 3], rotated as in players: phones store portrait videos in landscape format with
    a rotation angle."""
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))  # both count counter-clockwise


def read_video(file: str | Path) -> np.ndarray:
    """Read all frames of a video, uint8 [T, H, W, 3], rotated as in players. Raises Unreadable."""
    with _opened(file) as (container, stream):
        found = [_upright(frame) for frame in _decoded(container, stream)]
    if not found:
        raise Unreadable(f"{file} has no frames")
    return np.stack(found)


def write_video(frames: np.ndarray, file: Path, fps: float) -> None:
    """Write uint8 frames [T, H, W, 3] as H.264 in an mp4 file, atomically.

    H.264 with 4:2:0 chroma subsampling needs even sides, so the last row or column of an odd side is repeated.
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


@contextmanager
def _opened(file: str | Path) -> Iterator[tuple["InputContainer", "VideoStream"]]:
    """Context with the container and the first video stream of a file, decoded by several threads. Errors of FFmpeg and
    of the file system are raised as Unreadable."""
    av = _av()
    try:
        with av.open(str(file)) as container:
            if not container.streams.video:
                raise Unreadable(f"{file} has no video stream")
            stream = container.streams.video[0]
            stream.thread_type = "AUTO"
            yield container, stream
    except (av.FFmpegError, OSError) as error:
        raise Unreadable(f"{file}: {error}") from error


def _av() -> ModuleType:
    try:
        import av
    except ImportError as error:
        raise ValueError("videos need the package av: pip install 'hla-zoo[video]'") from error
    return av
