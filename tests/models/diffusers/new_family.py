"""Child process of test_new_family.py, whose `zoo` has the family of Latte."""

import copy
import sys
from pathlib import Path

import torch
from diffusers import LatteTransformer3DModel
from peft import LoraConfig

import zoo

SIZES = {"num_attention_heads": 2, "attention_head_dim": 16, "in_channels": 4, "num_layers": 2, "sample_size": 8}
SIZES |= {"out_channels": 4, "patch_size": 2, "cross_attention_dim": 32, "caption_channels": 12, "video_length": 3}
SIZES |= {"norm_type": "ada_norm_single", "activation_fn": "gelu-approximate", "norm_elementwise_affine": False}


@torch.no_grad()
def run(model: torch.nn.Module) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    x, text = torch.randn(1, 4, 3, 8, 8, generator=g), torch.randn(1, 5, 12, generator=g)
    return model.eval()(x, timestep=torch.tensor([7]), encoder_hidden_states=text).sample


def main(folder: Path) -> None:
    torch.manual_seed(0)
    host = LatteTransformer3DModel(**SIZES)
    wanted = run(host)
    same = copy.deepcopy(host)
    zoo.convert(same, "softmax")
    assert torch.equal(run(same), wanted)
    report = zoo.convert(host, "mhla", depthwise="v")
    assert [row.layer for row in report.swapped] == ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"]
    assert report.swapped[0].blocks == "2x2 of 4x4" and len(report.skipped) == 2
    assert not torch.equal(run(host), wanted)
    host.save_pretrained(folder / "saved")
    again = zoo.HLALatteTransformer3DModel.from_pretrained(folder / "saved")
    assert torch.equal(run(again), run(host))
    again.add_adapter(LoraConfig(r=2, target_modules=["to_q"]))  # the class of diffusers has no adapters
    assert any("attn1.to_q.lora_B" in name for name, _ in again.named_parameters())


if __name__ == "__main__":
    assert Path(zoo.__file__).is_relative_to(sys.argv[1])
    main(Path(sys.argv[1]))
