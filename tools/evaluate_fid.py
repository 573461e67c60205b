"""The command `zoo fid` as a script."""

from zoo.cli.fid import main
from zoo.config import command_line

if __name__ == "__main__":
    command_line(main)
