"""The command `zoo finetune-diffusion` as a script."""

from zoo.cli.finetune_diffusion import main
from zoo.config import command_line

if __name__ == "__main__":
    command_line(main)
