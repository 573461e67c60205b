"""The command `zoo train-classifier` as a script."""

from zoo.cli import command
from zoo.config import command_line

main = command("train-classifier")

if __name__ == "__main__":
    command_line(main)
