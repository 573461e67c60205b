"""Generate images or videos with a diffusion model, converted or not.

    zoo sample sample.model=facebook/DiT-XL-2-256 sample.scheduler=DDPMScheduler sample.steps=250 \\
        'sample.scheduler_options={variance_type: learned_range}' sample.guidance=1.5 out=dit.npz
    zoo sample sample.model=runs/digits_dit/transformer_ema sample.labels=balanced sample.count=100 out=samples.npz
    accelerate launch -m zoo.cli sample sample.model=PIXART sample.prompts=captions.txt sample.size=512 out=FOLDER
    zoo sample sample.model=runs/wan_mhla/transformer_ema sample.base=Wan-AI/Wan2.1-T2V-1.3B-Diffusers \\
        sample.prompts=captions.txt sample.size=480 sample.width=832 sample.frames=81 out=VIDEOS

Images are written to an .npz file in the layout of ADM or to a folder of PNG files; videos to a folder of mp4 files,
with a contact sheet of the first 16, one row per video. OUT.json holds the metadata.

Image i depends only on seed + i, not on the batch size or the number of GPUs (except for rounding errors). Rerun the
same command to resume.
"""

from zoo import config
from zoo.eval.fid.features import processes
from zoo.eval.sample_settings import SampleSettings
from zoo.eval.sampling import run_sampling

USAGE = "usage: zoo sample [CONFIG.yaml] sample.model=FOLDER out=SAMPLES.npz [sample.key=value ...]"


def main(words: list[str]) -> int:
    """Generate samples from command-line arguments. Returns the number of images made by this process; raises
    ValueError."""
    if config.print_help_if_asked(words, __doc__, USAGE, SampleSettings):
        return 0
    settings = config.from_command_line(SampleSettings, words)
    made = run_sampling(settings, " ".join(["zoo sample", *words]))
    if processes().is_main_process:
        print(f"wrote {settings.out} ({settings.sample.count} samples)")
    return made
