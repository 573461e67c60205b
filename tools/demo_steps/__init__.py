"""Steps of the demo: commands, report and figures."""

from demo_steps.dit import DIT, dit_commands, score_commands
from demo_steps.processes import alongside, run
from demo_steps.report import write_report
from demo_steps.vit import vit_commands

__all__ = ["DIT", "alongside", "dit_commands", "run", "score_commands", "vit_commands", "write_report"]
