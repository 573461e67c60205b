"""Compute FID, sFID, KID, Inception score, precision and recall of generated images.

    zoo fid fid.samples=samples.npz fid.reference=VIRTUAL_imagenet256_labeled.npz \\
        fid.weights=weights-inception-2015-12-05-6726825d.pth
    zoo fid fid.reference=IMAGES fid.image_size=256 fid.weights=FILE fid.save=stats.safetensors
    zoo fid fid.samples=FOLDER fid.reference=train.parquet fid.extractor=runs/classifier

For several processes, start the command with `accelerate launch -m zoo.cli fid`. The scores are written to a JSON file
next to the samples, with everything that they depend on. Compare two scores only if these metadata agree.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from zoo import config
from zoo.eval.fid.evaluate import reference_statistics, score
from zoo.eval.fid.extractors import open_extractor
from zoo.eval.fid.features import processes
from zoo.eval.fid.settings import FidSettings
from zoo.eval.fid.statistics import holds_statistics
from zoo.io import write_json

USAGE = "usage: zoo fid [CONFIG.yaml] fid.samples=IMAGES fid.reference=IMAGES_OR_STATISTICS [section.key=value]"


def main(words: list[str]) -> dict[str, Any]:
    """Score images from command-line arguments. Returns the scores with their metadata; raises ValueError."""
    if config.print_help_if_asked(words, __doc__, USAGE, FidSettings):
        return {}
    settings = config.from_command_line(FidSettings, words)
    state = processes()
    options = replace(settings.fid, device=settings.fid.device or str(state.device))
    if not options.reference or not (options.samples or options.save):
        raise ValueError(
            "say what to compare: fid.samples=IMAGES fid.reference=IMAGES_OR_STATISTICS (or fid.save=FILE)"
        )
    if options.save and holds_statistics(options.reference):
        raise ValueError(f"fid.save makes statistics of images, but {options.reference} holds statistics already")
    extractor = open_extractor(options.extractor, options.weights)
    reference = reference_statistics(options.reference, extractor, options)
    if options.save and state.is_main_process:
        reference.save(options.save)
        print(f"wrote {options.save}")
    if not options.samples:
        return {}
    result = score(options.samples, reference, extractor, options)
    if state.is_main_process:
        out = Path(settings.out or f"{options.samples.rstrip('/')}.fid.json")
        write_json(result | {"command": " ".join(["zoo fid", *words])}, out)
        for name, value in result["scores"].items():
            if value is not None:  # sFID needs spatial features
                print(f"{name}: {round(value, 5)}")
        print(f"wrote {out}")
    return result
