"""Images or videos of a diffusion model, converted or not: an .npz in the layout of ADM, a folder of PNG or mp4 files.

    zoo sample sample.model=facebook/DiT-XL-2-256 sample.scheduler=DDPMScheduler sample.steps=250 \\
        'sample.scheduler_options={variance_type: learned_range}' sample.guidance=1.5 out=dit.npz
    zoo sample sample.model=runs/digits_dit/transformer_ema sample.labels=balanced out=samples.npz
    accelerate launch -m zoo.cli sample sample.model=PIXART sample.prompts=captions.txt sample.size=512 out=FOLDER
    zoo sample sample.model=runs/wan_mhla/transformer_ema sample.base=Wan-AI/Wan2.1-T2V-1.3B-Diffusers \\
        sample.prompts=captions.txt sample.size=480 sample.width=832 sample.frames=81 out=VIDEOS

Image i depends on the seed + i alone: not on the batch, nor on the number of GPUs (up to the rounding of the device).
An interrupted run continues when it is started again. OUT.json says how they were made. Videos: mp4 files and a PNG,
contact-sheet.png, with the first 16, a line each.
"""

from zoo import config
from zoo.eval.fid.features import processes
from zoo.eval.sample_settings import SampleSettings
from zoo.eval.sampling import run_sampling

USAGE = "usage: zoo sample [CONFIG.yaml] sample.model=FOLDER out=SAMPLES.npz [sample.key=value ...]"


def main(words: list[str]) -> int:
    """Sample as the words of the command line say. Returns the number of new images here; raises ValueError."""
    if config.wants_help(words, __doc__, USAGE, SampleSettings):
        return 0
    settings = config.from_command_line(SampleSettings, words)
    made = run_sampling(settings, " ".join(["zoo sample", *words]))
    if processes().is_main_process:
        print(f"wrote {settings.out} ({settings.sample.count} samples)")
    return made
