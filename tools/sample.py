"""The command `zoo sample` as a script."""

from zoo.cli.sample import main
from zoo.config import command_line

if __name__ == "__main__":
    command_line(main)
