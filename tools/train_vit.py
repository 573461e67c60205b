"""The command `zoo train-classifier` as a script."""

from zoo.cli.train_classifier import main
from zoo.config import command_line

if __name__ == "__main__":
    command_line(main)
