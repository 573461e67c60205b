"""Video files, through PyAV (the libraries of FFmpeg)."""

import math
from collections.abc import Iterable
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zoo.data.decoding import Unreadable
from zoo.files import replacing

VIDEO_FILES = (".mp4", ".mov", ".mkv", ".webm", ".avi")
BACK = (0.0, 12.0, math.inf)  # seconds to look back for a key frame: frames of open groups lie before their own


class About(NamedTuple):
    """What a file says of its first video stream, as it is stored; frames: at its rate, fps, the mean of the whole."""

    frames: int
    height: int
    width: int
    fps: float


def about(file: str | Path) -> About:
    """Size of a video, from its head alone where that says it. Raises Unreadable."""
    with _Opened(file) as (container, stream):
        codec, fps = stream.codec_context, _rate(stream, file)
        frames = (
            stream.frames or round(_seconds(container, stream) * fps) or sum(1 for _ in _decoded(container, stream))
        )
        return About(frames, codec.height, codec.width, fps)


def read_frames(file: str | Path, numbers: Iterable[int], fps: float = 0.0) -> np.ndarray:
    """The frames with these numbers (from 0, growing) of the video played at `fps` frames a second (0: its own mean
    rate), uint8 [T, H, W, 3]: number n is what a player shows n / fps seconds after the first frame, turned as the file
    says. Raises Unreadable if the video ends before.

    Decodes from the key frame before the first number, so that the clips of a file cost as much as the file.
    """
    wanted = list(numbers)
    for back in BACK:
        with _Opened(file) as (container, stream):
            rate = _rate(stream, file)
            found = _shown(container, stream, [n / (fps or rate) for n in wanted], rate, back)
        if found is not None:
            break
    assert found is not None  # the last time it read from the start
    if len(found) < len(wanted):
        raise Unreadable(f"{file} ends before its frame {wanted[len(found)]}")
    return np.stack(found)


def _shown(container: Any, stream: Any, times: list[float], rate: float, back: float) -> list[np.ndarray] | None:
    """The frames that are shown at `times` [s after the first frame], as many as there are, decoded from the key frame
    `back` seconds before; None if decoding did not begin before the first of them."""
    found: list[np.ndarray] = []
    frames = iter(_decoded(container, stream))
    before = next(frames, None)
    if before is None:
        return found
    origin, midway = before.pts, times[0] - back > 1 / rate
    if midway and origin is None:
        return None
    if midway:
        container.seek(round((times[0] - back) / stream.time_base) + origin, stream=stream)
        frames, before = iter(_decoded(container, stream)), None
    clock, slack = 0.0, 0.25 / rate  # time stamps are rounded to ticks
    for number, frame in enumerate(frames, start=1):
        if frame.pts is None and midway:
            return None
        now = number / rate if origin is None or frame.pts is None else float((frame.pts - origin) * stream.time_base)
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


def _decoded(container: Any, stream: Any) -> Iterable[Any]:
    """The frames from where the container stands, in the order in which they are shown."""
    return container.decode(stream)


def _rate(stream: Any, file: str | Path) -> float:
    rate = stream.average_rate or stream.guessed_rate
    if not rate:
        raise Unreadable(f"{file} does not say its frame rate")
    return float(rate)


def _seconds(container: Any, stream: Any) -> float:
    """Length as the stream or the container says it; 0 if they do not."""
    if stream.duration:
        return float(stream.duration * stream.time_base)
    return (container.duration or 0) / 1e6


def _upright(frame: Any) -> np.ndarray:
    """[H, W, 3] as players show it: phones store portraits lying, with a note by how much to turn them."""
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))  # both counter-clockwise


def read_video(file: str | Path) -> np.ndarray:
    """Every frame, uint8 [T, H, W, 3]. Raises Unreadable."""
    with _Opened(file) as (container, stream):
        found = [_upright(frame) for frame in _decoded(container, stream)]
    if not found:
        raise Unreadable(f"{file} has no frames")
    return np.stack(found)


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
