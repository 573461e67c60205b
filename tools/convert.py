"""The command `zoo convert` as a script."""

from zoo.cli.convert import main
from zoo.config import command_line

if __name__ == "__main__":
    command_line(main)
