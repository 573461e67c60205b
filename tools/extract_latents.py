"""The command `zoo extract-latents` as a script."""

from zoo.cli.extract_latents import main
from zoo.config import command_line

if __name__ == "__main__":
    command_line(main)
