"""Feature extractors for uint8 images.

These are the Inception network of FID, timm models (DINOv2), classifiers trained by this package, and any module. The
identity of an extractor is everything that determines its features. It is stored with statistics, so that statistics of
another extractor are rejected.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import NamedTuple

import timm
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.data import resolve_data_config
from torch import Tensor, nn

from zoo.config import Tree
from zoo.errors import unknown_name
from zoo.io import weights_hash
from zoo.models.timm.model_files import load_model

INCEPTION = "inception"
SPATIAL_CHANNELS = 7  # number of channels of the first branch of mixed_6 that are ADM's spatial features
DINO_SIZE = 224  # side in pixels, in the definition of FD-DINOv2 (Stein et al. 2023)


class Features(NamedTuple):
    """Features of one batch, float32: pool [B, D], and if the network has them, spatial [B, S] and logits [B, C]."""

    pool: Tensor
    spatial: Tensor | None = None
    logits: Tensor | None = None


@dataclass(frozen=True)
class ExtractorIdentity:
    """Everything that determines the features of an extractor.

    name: name of the network.  sha256: hash of its weights.  dim: number of features.  resize: resizing of the images,
    as text.  mean, std: per channel.
    """

    name: str
    sha256: str
    dim: int
    resize: str
    mean: list[float]
    std: list[float]
    dtype: str = "float32"


class Extractor(nn.Module):
    """Network from uint8 images [B, 3, H, W] to `Features`, in evaluation mode."""

    identity: ExtractorIdentity

    def forward(self, images: Tensor) -> Features:
        """Compute the features of uint8 images [B, 3, H, W] on the device of the network."""
        raise NotImplementedError

    def check(self, stored: Tree, where: str) -> None:
        """Raise ValueError unless statistics with the identity `stored` were made by this extractor."""
        own = asdict(self.identity)
        changed = [k for k in own if stored.get(k) != own[k]]
        if changed:
            k = changed[0]
            raise ValueError(
                f"{where} holds statistics of another extractor: "
                f"{k} is {_short(stored.get(k))} there and {_short(own[k])} here"
            )


def _short(value: object) -> str:
    return f"{value[:12]}..." if isinstance(value, str) and len(value) == 64 else repr(value)


def _read_weights(file: str) -> dict[str, Tensor]:
    if not Path(file).is_file():
        raise ValueError(f"there is no weights file {file!r} for the extractor")
    try:
        return load_file(file) if file.endswith(".safetensors") else torch.load(file, "cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, OSError, RuntimeError, EOFError, ValueError) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"the weights file {file} cannot be read as tensors: {reason}") from error


class Inception(Extractor):
    """The Inception network of FID: TensorFlow's network of 2015-12-05 with its resizing, ported by torch-fidelity.

    weights: the file of torch-fidelity or pytorch-fid (weights-inception-2015-12-05-6726825d.pth), or a safetensors
    copy of it. Raises ValueError for other weights.

    Features: pool [B, 2048] is the output of the last pooling layer. spatial [B, 17 * 17 * 7] holds the first 7
    channels of the 1 x 1 branch of mixed_6, ordered by (row, column, channel) as in the statistics of ADM. logits
    [B, 1008] have no bias.
    """

    def __init__(self, weights: str) -> None:
        super().__init__()
        tensors = _read_weights(weights)
        try:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except ImportError as error:
            raise ValueError("Inception needs the package torch-fidelity: pip install 'hla-zoo[eval]'") from error
        with tempfile.TemporaryDirectory() as folder:
            # torch-fidelity unpickles the file that it is given, so write one that holds only tensors
            torch.save(tensors, f"{folder}/weights.pth")
            try:
                self.network = FeatureExtractorInceptionV3(
                    "inception-v3-compat", ["2048", "logits_unbiased"], f"{folder}/weights.pth"
                )
            except (RuntimeError, TypeError, AttributeError) as error:
                raise ValueError(f"{weights} does not hold the weights of the FID Inception network") from error
        self._spatial = torch.empty(0)
        self.network.Mixed_6d.branch1x1.register_forward_hook(self._keep)
        self.identity = ExtractorIdentity(
            INCEPTION, weights_hash(self.network), 2048, "bilinear of TensorFlow 1 to 299", [128.0] * 3, [128.0] * 3
        )

    def _keep(self, module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        self._spatial = output[:, :SPATIAL_CHANNELS].permute(0, 2, 3, 1).flatten(1)

    def forward(self, images: Tensor) -> Features:
        pool, logits = self.network(images)
        return Features(pool, self._spatial, logits)


class ModuleExtractor(Extractor):
    """Extractor made of any network.

    network: a network on normalized float images [B, 3, H, W].  name: name in the identity.  size: (height, width) to
    which other images are resized (bicubic, antialiased); None keeps their size.  mean, std: normalization of pixels in
    0 to 1.  features: calls the network; returns features [B, D], or (features, logits [B, C]).

    Raises ValueError if `features` returns something else.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        network: nn.Module,
        name: str,
        size: tuple[int, int] | None = None,
        mean: Sequence[float] = (0.5, 0.5, 0.5),
        std: Sequence[float] = (0.5, 0.5, 0.5),
        features: Callable[[nn.Module, Tensor], Tensor | tuple[Tensor, Tensor]] = lambda network, x: network(x),
    ) -> None:
        super().__init__()
        self.network = network.eval().requires_grad_(False)
        self.features, self.size = features, size
        self.register_buffer("mean", torch.tensor(list(mean)).reshape(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(list(std)).reshape(3, 1, 1), persistent=False)
        device = next((p.device for p in network.parameters()), torch.device("cpu"))
        self.to(device)
        resize = f"bicubic antialiased to {size[0]} x {size[1]}" if size else "none"
        with torch.no_grad():
            probe = self(torch.zeros(2, 3, *(size or (32, 32)), dtype=torch.uint8, device=device))
        self.identity = ExtractorIdentity(
            name, weights_hash(network), probe.pool.shape[1], resize, [float(m) for m in mean], [float(s) for s in std]
        )

    def forward(self, images: Tensor) -> Features:
        x = images.float()
        if self.size and tuple(x.shape[2:]) != tuple(self.size):
            x = F.interpolate(x, self.size, mode="bicubic", antialias=True).clamp(0, 255)
        found = self.features(self.network, (x / 255 - self.mean) / self.std)
        pool, logits = found if isinstance(found, tuple) else (found, None)
        if not isinstance(pool, Tensor) or pool.ndim != 2 or len(pool) != len(images):
            shape = list(pool.shape) if isinstance(pool, Tensor) else type(pool).__name__
            raise ValueError(f"an extractor must return features [B, D] for {len(images)} images, got {shape}")
        return Features(pool.float(), None, None if logits is None else logits.float())


def timm_extractor(name: str, weights: str = "") -> ModuleExtractor:
    """Create an extractor of the pooled features of a timm model, with published weights or a weights file. For DINOv2
    it is the class token at 224 pixels. Raises ValueError if the weights are missing."""
    size = {"img_size": DINO_SIZE} if "dinov2" in name else {}
    overlay = {"pretrained_cfg_overlay": {"file": weights}} if weights else {}
    if weights and not Path(weights).is_file():
        raise ValueError(f"there is no weights file {weights!r} for the extractor")
    try:
        network = timm.create_model(name, pretrained=True, num_classes=0, **size, **overlay)
    except (RuntimeError, OSError) as error:  # OSError is raised by huggingface_hub
        raise ValueError(f"timm cannot give {name} its weights: {str(error).splitlines()[0]}") from error
    spec = resolve_data_config(size, model=network)
    height, width = spec["input_size"][1:]
    return ModuleExtractor(network, name, (height, width), spec["mean"], spec["std"])


def run_extractor(folder: str) -> ModuleExtractor:
    """Create an extractor of the final features (classifier inputs) and logits of a classifier in a run folder. Raises
    ValueError if its input images are not described there."""
    network, recipe = load_model(folder)
    spec = recipe.input
    if not spec:
        raise ValueError(f"{folder} does not say which images its model reads: train or convert it with these tools")
    size = (int(spec["size"][0]), int(spec["size"][1]))
    return ModuleExtractor(network, recipe.describe(), size, spec["mean"], spec["std"], _before_classifier)


def _before_classifier(network: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    tokens = network.forward_features(x)  # type: ignore[operator]
    return network.forward_head(tokens, pre_logits=True), network.forward_head(tokens)  # type: ignore[operator]


def open_extractor(name: str, weights: str = "") -> Extractor:
    """Open an extractor: `inception` (requires `weights`), a timm model, or the run folder of a classifier. Raises
    ValueError for other names and for missing weights."""
    if Path(name).exists():
        if weights:
            raise ValueError(f"the extractor {name} has its own weights; leave out fid.weights={weights}")
        return run_extractor(name)
    if name == INCEPTION:
        if not weights:
            raise ValueError(
                "the extractor inception needs fid.weights=FILE: "
                "weights-inception-2015-12-05-6726825d.pth from https://github.com/toshas/torch-fidelity/releases; or "
                "take fid.extractor=vit_small_patch14_dinov2.lvd142m or fid.extractor=RUN_FOLDER of a classifier"
            )
        return Inception(weights)
    if not timm.is_model(name.split(".")[0]):
        raise unknown_name("extractor (or run folder)", name, [INCEPTION, *timm.list_models()])
    return timm_extractor(name, weights)
