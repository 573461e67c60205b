"""Image transforms: timm's transforms, created from the settings `data` and `augment`."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields

from PIL import Image, ImageOps
from timm.data import create_transform, resolve_data_config
from timm.data.transforms import str_to_interp_mode
from torch import Tensor, nn
from torchvision import transforms as T

from zoo.config import Tree
from zoo.data.settings import AugmentSettings, DataSettings

Transform = Callable[[Image.Image], Tensor]


@dataclass(frozen=True)
class InputSpec:
    """Preprocessing of a model's input images, with timm's names.

    size: (height, width) in pixels.  mean, std: per channel.  crop_pct: fraction of the resized image that the
    evaluation crop keeps.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    crop_pct: float
    interpolation: str = "bicubic"
    crop_mode: str = "center"

    @classmethod
    def of(cls, model: nn.Module, img_size: int | None, data: DataSettings) -> "InputSpec":
        """Read the input of a timm model from its pretrained configuration, overridden by `img_size` and `data`."""
        args = {"img_size": img_size, "crop_pct": data.crop_pct, "mean": data.mean, "std": data.std}
        found = resolve_data_config({k: v for k, v in args.items() if v is not None}, model=model)
        return cls(
            size=tuple(found["input_size"][1:]),
            mean=tuple(found["mean"]),
            std=tuple(found["std"]),
            crop_pct=found["crop_pct"],
            interpolation=found["interpolation"],
            crop_mode=found["crop_mode"],
        )

    @classmethod
    def from_recipe(cls, stored: Tree, data: DataSettings) -> "InputSpec":
        """Read the input saved in a checkpoint, overridden by `data`. Raises ValueError for unknown or missing keys."""
        changes = {"crop_pct": data.crop_pct, "mean": data.mean, "std": data.std}
        values = {**stored, **{k: v for k, v in changes.items() if v is not None}}
        known = {f.name for f in fields(cls)}
        listed = all(isinstance(values.get(k), list | tuple) for k in ("size", "mean", "std"))
        if not listed or "crop_pct" not in values or values.keys() - known:
            raise ValueError(f"the input that a checkpoint names needs {', '.join(sorted(known))}, got {stored}")
        lists = {k: tuple(values[k]) for k in ("size", "mean", "std")}
        return cls(**{**values, **lists})

    def timm(self) -> Tree:
        """Keyword arguments of timm's create_transform."""
        shared = {k: getattr(self, k) for k in ("mean", "std", "crop_pct", "interpolation", "crop_mode")}
        return {"input_size": (3, *self.size), **shared}


def eval_transform(spec: InputSpec, normalize: bool = True) -> Transform:
    """Create the evaluation transform: resize and centre crop, image -> normalized float32 [3, H, W], or uint8 without
    `normalize`."""
    return create_transform(**spec.timm(), is_training=False, normalize=normalize)


def train_transform(spec: InputSpec, augment: AugmentSettings) -> Transform:
    """Create the training transform: random crop, flip, colour jitter, auto-augment policy and random erasing, image ->
    float32 [3, H, W]. It uses the global random generators of python, numpy and torch."""
    arguments: Tree = {
        **spec.timm(),
        "is_training": True,
        "scale": tuple(augment.scale),
        "hflip": augment.hflip,
        "color_jitter": augment.color_jitter or None,
        "auto_augment": augment.auto_augment or None,
        "re_prob": augment.random_erase,
        "re_mode": "pixel",
    }
    first, second, last = create_transform(**arguments, separate=True)
    _limit_posterize(second)
    if augment.crop != "resized":
        first = _fixed_scale(spec, augment)
    return T.Compose([first, second, last])


def _limit_posterize(policies: T.Compose) -> None:
    """Let the Posterize operations of auto-augment policies keep at least 1 bit: timm's strongest level keeps 0 bits (a
    black image), which Pillow 13 rejects."""
    for policy in policies.transforms:
        operations = [*getattr(policy, "ops", []), *itertools.chain(*getattr(policy, "policy", []))]
        for operation in operations:
            if operation.name.startswith("Posterize"):
                operation.aug_fn = _posterize


def _posterize(image: Image.Image, bits: int, **_: object) -> Image.Image:
    return ImageOps.posterize(image, max(bits, 1))


def _fixed_scale(spec: InputSpec, augment: AugmentSettings) -> Transform:
    """Create a transform without random scale: resize to the input size, shift randomly (crop "padded" only) and flip.
    It is the usual augmentation of 32 x 32 images."""
    resize = T.Resize(max(spec.size), interpolation=str_to_interp_mode(spec.interpolation))  # of the shorter side
    steps: list[nn.Module] = [resize, T.CenterCrop(spec.size)]
    if augment.crop == "padded":
        steps.append(T.RandomCrop(spec.size, padding=augment.pad))
    return T.Compose([*steps, T.RandomHorizontalFlip(augment.hflip)])


def check_cacheable(data: DataSettings, augment: AugmentSettings) -> None:
    """Raise ValueError if `data.cache` is set together with augmentation other than crops and flips."""
    if not data.cache:
        return
    wrong = [k for k in ("color_jitter", "auto_augment", "random_erase") if getattr(augment, k)]
    if wrong:
        raise ValueError(f"data.cache allows only crops and flips; switch off augment.{', augment.'.join(wrong)}")


def center_crop(image: Image.Image, size: int) -> Image.Image:
    """Resize and centre-crop an image to a square of `size` pixels, as in ADM (Dhariwal and Nichol, arXiv 2105.05233).

    A box filter halves the image while its shorter side is at least twice `size`; a bicubic filter does the rest.
    """
    while min(image.size) >= 2 * size:
        image = image.resize((image.width // 2, image.height // 2), Image.Resampling.BOX)
    scale = size / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), Image.Resampling.BICUBIC)
    left, top = (image.width - size) // 2, (image.height - size) // 2
    return image.crop((left, top, left + size, top + size))
