"""The command `zoo evaluate` as a script."""

from zoo.cli.evaluate import main
from zoo.config import command_line

if __name__ == "__main__":
    command_line(main)
