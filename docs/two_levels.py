"""Simulation of other exact and far tiles in adaptive multipole attention: closeness of a trained ViT to softmax.

    python docs/two_levels.py RUN data.val=VAL.parquet [images=100] [batch_size=4] [json=...]

RUN is a softmax classifier (tools/train_vit.py). One level: key tiles of `fine` tokens. Two levels: a query tile
refines the fraction `refine` of the tiles of `coarse` tokens by expected error; exact tiles are chosen among the
refined ones, other tokens are pooled by coarse tiles. Nearest tiles: the fraction `near` of the exact tiles of a query
tile are its nearest ones, the others are chosen by expected error, so that the density stays. A model of fewer than
256 tokens has the smaller tiles of `SMALL`. All weights are formed, N x N per head. Writes runs/two-levels.json.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

import hla_kernels
from hla_kernels.softmax.adaptive.layout import Field, tokens_of
from hla_kernels.softmax.adaptive.routing import nearest
from zoo import config
from zoo.eval.compare import open_candidate
from zoo.io import result_file, write_json
from zoo.models.convert import swap

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))  # where the benchmarks are

from benchmarks.fidelity import FidelitySettings, load_images, logits, percent  # noqa: E402

KEYS = ("fine", "coarse", "refine", "near")  # of a row of LEVELS
LEVELS = [
    (16, 0, 0.0, 0.0), (32, 0, 0.0, 0.0), (64, 0, 0.0, 0.0), (16, 64, 0.5, 0.0), (16, 64, 0.25, 0.0),
    (16, 256, 0.5, 0.0), (16, 256, 0.25, 0.0), (16, 0, 0.0, 0.25), (16, 0, 0.0, 0.5),
]  # fmt: skip
SMALL = [(4, 0, 0.0, 0.0), (4, 0, 0.0, 0.25), (4, 0, 0.0, 0.5)]  # of fewer than 256 tokens, with query tiles of 16
PART = 4  # neighbouring queries whose mean is scored


@dataclass
class Tiles:
    """Tiles of keys: member [N, T], 1 for the tokens of a tile; mean and variance [B, H, T, D]."""

    member: Tensor
    mean: Tensor
    variance: Tensor

    @classmethod
    def of(cls, k: Tensor, field: Field, size: int) -> "Tiles":
        member = members(field, size, k.device)
        n = member.sum(0)[:, None]
        mean = member.mT @ k / n
        return cls(member, mean, member.mT @ (k - member @ mean).square() / n)

    def errors(self, q: Tensor, field: Field) -> Tensor:
        """Return the expected error of each tile for each query tile, [B, H, U, T]."""
        part, own = (members(field, size, q.device) for size in (PART, field.q_tile))
        q = part.mT @ q / part.sum(0)[:, None]
        spread = q.square() @ self.variance.mT
        p = (q @ self.mean.mT + spread / 2 + self.member.sum(0).log()).softmax(-1)
        return (part.mT @ own).mT @ (p * spread)


def members(field: Field, size: int, device: torch.device) -> Tensor:
    """Return which token lies in which tile of the grid, float32 [N, T]."""
    tokens = tokens_of(field, size, device)[: field.n_grid]
    count = -(-field.n_outer // size)
    tokens = tokens[: len(tokens) - count] if count else tokens
    return F.one_hot(tokens, field.n_tokens + 1)[..., :-1].sum(1).mT.float()


def highest(found: Tensor, fraction: float) -> Tensor:
    """Return the given fraction of tiles with the highest values, bool."""
    count = max(1, int(fraction * found.shape[-1] + 0.5))
    return torch.zeros_like(found, dtype=torch.bool).scatter(-1, found.topk(count, -1).indices, True)


def attention(q: Tensor, k: Tensor, v: Tensor, *, levels: tuple[int, int, float, float], density: float, far: str,
              grid: tuple[int, ...], prefix: int, suffix: int, q_scale: float, q_tile: int = 64,
              **_: Any) -> Tensor:  # fmt: skip
    """Return the attention [B, N, H, D] of one or two levels."""
    size, coarse, refine, near = levels
    field = Field(tuple(grid), prefix, suffix, q_tile, size)
    q, k, v = (x.transpose(1, 2).float() for x in (q * q_scale, k, v))
    own, fine = members(field, q_tile, q.device), Tiles.of(k, field, size)
    errors, pooled = fine.errors(q, field), q @ fine.mean.mT @ fine.member.mT
    if coarse:
        rough = Tiles.of(k, field, coarse)
        kept = highest(rough.errors(q, field), refine).float()
        inside = (rough.member.mT @ fine.member > 0).float()
        errors = errors.masked_fill(kept @ inside == 0, -1)
        refined = own @ kept @ rough.member.mT > 0
        pooled = torch.where(refined, pooled, q @ rough.mean.mT @ rough.member.mT)
    closest = nearest(field, int(near * field.exact(density) + 0.5), q.device)  # [U, k]
    errors = errors.scatter(-1, closest.expand(*errors.shape[:2], -1, -1), torch.inf)
    exact = own @ highest(errors, density).float() @ fine.member.mT > 0
    on_grid = fine.member.sum(-1) > 0
    exact = exact | ~on_grid | ~on_grid[:, None]
    s = q @ k.mT
    power = torch.where(exact, s, pooled)
    w = (power - power.amax(-1, keepdim=True)).exp()
    total = w.sum(-1, keepdim=True)
    if far == "first":
        w = w + w.masked_fill(exact, 0).sum(-1, keepdim=True) / field.n_grid * (s - pooled) * on_grid
    return (w / total @ v).transpose(1, 2).contiguous()


def rows(settings: FidelitySettings) -> list[dict[str, Any]]:
    """Return one row per far field, density and levels; the first level is also computed by the operator."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    candidate = open_candidate(settings.models[0], settings.data)
    model: Any = candidate.model.to(device).eval()
    images, labels = load_images(candidate, settings, device)
    wanted, found = logits(model, images), []
    few = model.patch_embed.num_patches < 256
    levels_of, densities, q_tile = (SMALL, (1 / 4, 1 / 8), 16) if few else (LEVELS, (1 / 8, 1 / 16), 64)
    fine = levels_of[0][0]
    swap(model, "multipole", select="error", density=0.125, k_tile=fine, q_tile=q_tile)
    operator = hla_kernels.adaptive_multipole

    def measure(call: Callable[..., Tensor], **place: Any) -> None:
        with patch.object(hla_kernels, "adaptive_multipole", call):
            got = logits(model, images)
        kl = F.kl_div(got.log_softmax(-1), wanted.log_softmax(-1), reduction="batchmean", log_target=True)
        top1 = {"top1": percent(got.argmax(-1) == labels), "softmax_top1": percent(wanted.argmax(-1) == labels)}
        found.append(place | {"kl": round(float(kl), 5), **top1, "images": len(labels)})
        print(found[-1])

    for far in ("first", "mean"):
        for density in densities:
            given = {"far": far, "density": density}
            measure(lambda *t, given=given, **o: operator(*t, **(o | given)), form="operator", fine=fine, **given)
            for levels in levels_of:
                call = partial(attention, levels=levels)
                measure(
                    lambda *t, given=given, call=call, **o: call(*t, **(o | given)), form="simulation",
                    **dict(zip(KEYS, levels, strict=True)), **given,
                )  # fmt: skip
    return found


def main(words: list[str]) -> None:
    """Measure all rows and write the result file."""
    run, *more = words
    torch.set_float32_matmul_precision("high")
    file = Path("runs/two-levels.json")
    defaults = [f"models=[{run}]", "images=100", "batch_size=4", f"json={file}", "data.source=parquet"]
    settings: FidelitySettings = config.from_command_line(FidelitySettings, [*defaults, *more])
    write_json(result_file(" ".join(["python docs/two_levels.py", *words]), rows(settings)), Path(settings.json))


if __name__ == "__main__":
    main(sys.argv[1:])
