"""Peak memory of generating a video piece by piece with the first 8 blocks of Wan2.1-1.3B and random weights.

    python docs/streaming_memory.py [json]

Frame-causal `la` in bfloat16 on the current CUDA device, 480p, 16 and 160 latent frames in pieces of 4, two denoising
steps; writes runs/streaming-memory.json.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from torch import Tensor

import zoo
from zoo.diffusion.streaming import FrameStream
from zoo.io import result_file, write_json

FILE = Path("runs/streaming-memory.json")
PLACE: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
MIB = 2**20


def denoiser() -> WanTransformer3DModel:
    """Return the converted transformer."""
    torch.manual_seed(0)
    sizes = {"num_attention_heads": 12, "attention_head_dim": 128, "ffn_dim": 8960, "num_layers": 8, "text_dim": 4096}
    model = WanTransformer3DModel(in_channels=16, out_channels=16, **sizes).to(**PLACE).eval()
    zoo.convert(model, "la", causal="frame")
    return model.to(**PLACE)


@torch.no_grad()
def row(model: WanTransformer3DModel, frames: int) -> dict[str, Any]:
    """Return MiB of the states, of the noise, and at the peak without the noise."""
    noise, text = torch.randn(1, 16, frames, 60, 104, **PLACE), torch.randn(1, 64, 4096, **PLACE)
    stream = FrameStream(model)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()

    def predict(x: Tensor, t: Tensor) -> Tensor:
        return model(hidden_states=x, timestep=t.expand(1), encoder_hidden_states=text)[0]

    for _ in stream.denoise(FlowMatchEulerDiscreteScheduler(), noise, 2, 4, predict):
        pass
    peak = torch.cuda.max_memory_allocated() - noise.nbytes
    return {"frames": frames, "states": stream.nbytes / MIB, "noise": noise.nbytes / MIB, "peak": round(peak / MIB)}


def main() -> None:
    """Measure both lengths and write the result file."""
    model = denoiser()
    rows = [row(model, frames) for frames in (16, 160)]
    print(*rows, sep="\n")
    write_json(result_file("python docs/streaming_memory.py", rows), Path(sys.argv[1]) if sys.argv[1:] else FILE)


if __name__ == "__main__":
    main()
