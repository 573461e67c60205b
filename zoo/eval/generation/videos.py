"""Videos of diffusion models: samplers, the folder they go to, and contact sheets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from zoo.data.decoding import IMAGE_FILES, Unreadable, decode
from zoo.data.latents.encoders import decode_latents, load_vae, video_factors
from zoo.data.video.clips import cover
from zoo.data.video.files import read_video, write_video
from zoo.eval.generation.outputs import PngFolder
from zoo.eval.generation.samplers import (
    ClassSampler,
    TextSampler,
    check_resolution,
    describe,
    only_own_noise,
    seeded,
    to_uint8,
)
from zoo.files import replacing

WAN_FPS = 16.0  # of the videos that Wan was trained on
SHEET = "contact-sheet.png"
COLUMNS, ROWS = 8, 16  # most frames a clip, and clips, on a contact sheet


def reads_class_tokens(transformer: Any) -> bool:
    """Whether a transformer has no embedding of classes but reads tokens, one of which can be a class."""
    return getattr(transformer.config, "text_dim", None) is not None


def class_tokens(labels: Tensor, classes: int) -> Tensor:
    """Class numbers [B] as one token each, [B, 1, classes]: one-hot, so that the projection of text in the model is a
    table of class embeddings; the number `classes` stands for no class, all zeros."""
    return F.one_hot(labels, classes + 1)[:, None, :classes].float()


def contact_sheet(clips: Tensor) -> np.ndarray:
    """uint8 clips [n, 3, T, H, W] as one picture [n H, k W, 3]: a clip a line, its first, last and frames between."""
    frames = clips.shape[2]
    chosen = torch.linspace(0, frames - 1, min(COLUMNS, frames)).round().long()
    picture = clips[:, :, chosen].permute(0, 3, 2, 4, 1)  # [n, H, k, W, 3]
    return picture.flatten(2, 3).flatten(0, 1).cpu().numpy()


def save_sheet(clips: Tensor, file: Path) -> np.ndarray:
    """Write the contact sheet of uint8 clips [n, 3, T, H, W] as PNG; returns it."""
    sheet = contact_sheet(clips)
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as temporary:
        Image.fromarray(sheet).save(temporary, format="PNG")
    return sheet


def grid_video(clips: Tensor) -> np.ndarray:
    """uint8 clips [n, 3, T, H, W] beside and below each other: frames [T, rows H, columns W, 3]."""
    n = len(clips)
    columns = int(np.ceil(np.sqrt(n)))
    rows = -(-n // columns)
    full = F.pad(clips, (0,) * 8 + (0, rows * columns - n), value=255)
    grid = full.unflatten(0, (rows, columns)).permute(3, 0, 4, 1, 5, 2)  # [T, rows, H, columns, W, 3]
    return grid.flatten(3, 4).flatten(1, 2).cpu().numpy()


class Mp4Folder(PngFolder):
    """000000.mp4, 000001.mp4, ..., metadata.csv, and the contact sheet of the first clips."""

    ending = ".mp4"

    def __init__(self, path: str, fps: float) -> None:
        if path.endswith(".npz"):
            raise ValueError(f"videos go into a folder of mp4 files, got out={path!r}")
        super().__init__(path)
        self.fps = fps

    def write(self, numbers: Sequence[int], images: Tensor) -> None:
        for number, clip in zip(numbers, images, strict=True):
            write_video(clip.permute(1, 2, 3, 0).numpy(), self.path / f"{number:06d}{self.ending}", self.fps)

    def finish(self, labels: list[int] | list[str], column: str) -> None:
        super().finish(labels, column)
        first = sorted(self.path.glob(f"*{self.ending}"))[:ROWS]
        clips = [torch.from_numpy(read_video(file)).permute(3, 0, 1, 2) for file in first]
        save_sheet(torch.stack(clips), self.path / SHEET)


class ClassVideoSampler(ClassSampler):
    """Samples a bare video transformer that reads classes as tokens, in pixels or in the latents of a VAE.

    about: what its run noted of its data (input.json): space, image_size [frames, height, width], fps, vae, scaling and
    shift. Other arguments as in `ClassSampler`; size, width and frames (pixels) change image_size.

    Raises ValueError for a size that the patches do not divide and labels that the model does not have.
    """

    def __init__(
        self,
        transformer: Any,
        scheduler: Any,
        about: dict[str, Any],
        *,
        size: int | None = None,
        width: int | None = None,
        frames: int | None = None,
        steps: int = 50,
        guidance: float = 1.0,
        labels: str | list[int] = "random",
        seed: int = 0,
    ) -> None:
        self.transformer, self.scheduler, self.data = transformer, scheduler, about
        self.steps, self.guidance, self.seed, self.choice = steps, guidance, seed, labels
        config = transformer.config
        self.classes, self.channels, self.guided = config.text_dim, config.in_channels, config.in_channels
        self.learned, self.fps = False, about["fps"]
        self.check_labels()
        given = (frames, size, width)
        self.pixels = tuple(new or old for new, old in zip(given, about["image_size"], strict=True))
        self.vae = load_vae(about["vae"]).to(transformer.device) if about["space"] == "latents" else None
        time, space = (1, 1) if self.vae is None else video_factors(self.vae)
        check_video(self.pixels, config.patch_size, time, space)
        self.shape = (self.channels, (self.pixels[0] - 1) // time + 1, *(n // space for n in self.pixels[1:]))

    def _condition(self, labels: Tensor) -> dict[str, Tensor]:
        return {"encoder_hidden_states": class_tokens(labels, self.classes).to(self.transformer.dtype)}

    def _decode(self, x: Tensor) -> Tensor:
        if self.vae is None:
            return x
        return decode_latents(self.vae, x, self.data["scaling"], self.data["shift"])

    def about(self) -> dict[str, Any]:
        return self.described() | {"size": list(self.pixels), "fps": self.fps}


class VideoSampler(TextSampler):
    """Samples a text-to-video or image-to-video pipeline of diffusers. Prompt and image i % n make video i.

    images: folder of first frames, for image to video; empty for others.  size, width, frames: pixels; None takes those
    of the pipeline. Raises ValueError as `TextSampler`, and for images that are missing or not wanted.
    """

    def __init__(
        self,
        pipeline: Any,
        prompts: list[str],
        *,
        images: str | None = None,
        size: int | None = None,
        width: int | None = None,
        frames: int | None = None,
        **shared: Any,
    ) -> None:
        super().__init__(pipeline, prompts, **shared)
        given = {"num_frames": frames, "height": size, "width": width if width or not size else size}
        self.pixels = tuple(n or self.parameters[name].default for name, n in given.items())
        rate = self.parameters.get("frame_rate")  # which LTX-Video is told
        self.fps = float(rate.default) if rate else WAN_FPS
        check_video(self.pixels, *units(pipeline))
        wants = "image" in self.parameters
        if wants != bool(images):
            need = "sample.images=FOLDER, the first frames" if wants else "no sample.images"
            raise ValueError(f"{type(pipeline).__name__} needs {need}")
        self.images = _first_frames(Path(images)) if images else []

    @torch.no_grad()
    def __call__(self, numbers: Sequence[int]) -> Tensor:
        return torch.cat([self._one(number) for number in numbers])  # one by one: they are large

    def _one(self, number: int) -> Tensor:
        pipe, (frames, height, width) = self.pipeline, self.pixels
        extra: dict[str, Any] = dict(self.fixed)
        if self.images:
            picture = _pixels(self.images[number % len(self.images)])
            first = cover(picture[None], height, width)[:, 0].permute(1, 2, 0).numpy()
            extra["image"] = Image.fromarray(first)
        with only_own_noise(type(pipe.scheduler).__name__, pipe.device):
            found = pipe(
                prompt=self.prompts[number % len(self.prompts)],
                generator=seeded(self.seed, [number])[0],
                num_inference_steps=self.steps,
                guidance_scale=self.guidance,
                num_frames=frames,
                height=height,
                width=width,
                output_type="np",
                **extra,
            ).frames
        return to_uint8(torch.from_numpy(np.asarray(found)).permute(0, 4, 1, 2, 3) * 2 - 1)

    def about(self) -> dict[str, Any]:
        more = {"size": list(self.pixels), "fps": self.fps, "first_frames": len(self.images)}
        second = getattr(self.pipeline, "transformer_2", None)
        if second is not None:
            more["second"] = describe(second, self.pipeline.scheduler)
        return super().about() | more


def units(pipeline: Any) -> tuple[list[int], int, int]:
    """Patch (T, H, W) of the transformer, and frames and pixels a side for one latent, of a pipeline of videos."""
    patch = list(patch_of(pipeline.transformer.config))
    if hasattr(pipeline, "vae_temporal_compression_ratio"):  # LTX-Video
        return patch, pipeline.vae_temporal_compression_ratio, pipeline.vae_spatial_compression_ratio
    return patch, pipeline.vae_scale_factor_temporal, pipeline.vae_scale_factor_spatial


def patch_of(config: Any) -> Any:
    """The sides of a patch as the configuration of a transformer has them: a number (images), or one a dimension."""
    space, time = config["patch_size"], config.get("patch_size_t")
    return space if time is None else (time, space, space)  # LTX-Video names both


def check_video(pixels: Sequence[int], patch: Sequence[int], time: int, space: int) -> None:
    """Raise ValueError unless clips (T, H, W) are whole patches of latents with these steps in time and space."""
    frames, *sides = pixels
    if frames < 1 or (frames - 1) % time or ((frames - 1) // time + 1) % patch[0]:
        rule = f"{time} n + 1" if time > 1 else f"a positive multiple of {patch[0]}"
        raise ValueError(f"sample.frames must be {rule}, got {frames}")
    for side, one in zip(sides, patch[1:], strict=True):
        check_resolution(side, one, space)


def _first_frames(folder: Path) -> list[Path]:
    found = sorted(p for p in folder.glob("*") if p.suffix.lower() in IMAGE_FILES)
    if not found:
        raise ValueError(f"there are no images in sample.images={folder}")
    return found


def _pixels(file: Path) -> np.ndarray:
    """uint8 [H, W, 3]. Raises ValueError for a file that cannot be read."""
    try:
        return np.array(decode(str(file)))
    except Unreadable as error:
        raise ValueError(f"sample.images: {file} cannot be read: {error}") from error
