"""The command `zoo evaluate` as a script."""

from zoo.cli import command
from zoo.config import command_line

main = command("evaluate")

if __name__ == "__main__":
    command_line(main)
