"""The command `zoo finetune-diffusion` as a script."""

from zoo.cli import command
from zoo.config import command_line

main = command("finetune-diffusion")

if __name__ == "__main__":
    command_line(main)
