"""Run one of timm's own scripts with our model names registered.

    python tools/timm_run.py path/to/validate.py --model vit_mhla_small_patch16_224 --data-dir VAL
    python tools/timm_run.py path/to/train.py --model deit_hla2_tiny_patch16_224 --data-dir DATA

TorchScript (--torchscript) is not supported; --torchcompile works. With Pillow 13, timm's scripts fail for policies
such as rand-m9 ("bits must be between ..."): append -mmax9 to the policy.
"""

import runpy
import sys
import traceback
from pathlib import Path

import zoo  # noqa: F401  registers the names
from zoo import config


def main(words: list[str]) -> None:
    """Run the script `words[0]` as __main__ with the remaining arguments. Raises ValueError if it does not exist."""
    if not words or words[0] in ("-h", "--help"):
        print(f"{__doc__}\nusage: timm_run.py SCRIPT [ARGUMENTS OF THE SCRIPT]")
        return
    script = Path(words[0])
    if not script.is_file():
        raise ValueError(
            f"there is no script {script}; clone pytorch-image-models and give the path of its train.py or validate.py"
        )
    sys.argv = [str(script), *words[1:]]
    sys.path[0] = str(script.parent.resolve())  # as python does for a script
    try:
        runpy.run_path(str(script), run_name="__main__")
    except ValueError:  # raised by the script: keep its traceback
        traceback.print_exc()
        raise SystemExit(1) from None


if __name__ == "__main__":
    config.command_line(main)
