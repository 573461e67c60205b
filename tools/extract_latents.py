"""The command `zoo extract-latents` as a script."""

from zoo.cli import command
from zoo.config import command_line

main = command("extract-latents")

if __name__ == "__main__":
    command_line(main)
