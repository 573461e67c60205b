"""The demo: the commands of which it consists, and the report of what they measured."""

from zoo.eval.demo.dit import DIT, dit_commands, score_command, write_digits
from zoo.eval.demo.report import write_report
from zoo.eval.demo.vit import vit_commands

__all__ = ["DIT", "dit_commands", "score_command", "vit_commands", "write_digits", "write_report"]
