"""Tab completion of the command `zoo` in bash."""

import contextlib
import importlib
import io
import re
from collections.abc import Iterable

from zoo.cli.listing import KINDS
from zoo.config import one_of, shipped_configs

SUBCOMMANDS = {"convert": ["recipe"], "evaluate": ["attention"], "list": list(KINDS)}
SCRIPT = """_zoo() {{
  local current=${{COMP_WORDS[COMP_CWORD]}} words=""
  if [ "$COMP_CWORD" -eq 1 ]; then
    words="{commands}"
  else
    case ${{COMP_WORDS[1]}} in
{cases}
    esac
  fi
  mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
  if [[ "${{COMPREPLY[0]}}" == *= ]]; then compopt -o nospace; fi
}}
complete -o default -F _zoo zoo"""


def script(shell: str, modules: dict[str, str]) -> str:
    """Make the completion script of a shell.

    modules: module of each command. Raises ValueError for a shell other than bash.
    """
    one_of("shell", shell, ("bash",))
    configs = list(shipped_configs())
    cases = []
    for name, module in modules.items():
        words = [*SUBCOMMANDS.get(name, []), *keys(module, [[], *([word] for word in SUBCOMMANDS.get(name, []))])]
        words += configs if any(word.endswith("=") for word in words) else []
        cases.append(f'    {name}) words="{" ".join(words)}" ;;')
    return SCRIPT.format(commands=" ".join([*modules, "--help", "--version"]), cases="\n".join(cases))


def keys(module: str, beginnings: Iterable[list[str]]) -> list[str]:
    """Collect the keys in the help texts of a command, as `section.key=`, each once.

    beginnings: words after which `--help` is called, one list per help text.
    """
    shown = io.StringIO()
    for words in beginnings:
        with contextlib.redirect_stdout(shown), contextlib.suppress(ValueError):  # benchmark may raise it
            importlib.import_module(module).main([*words, "--help"])
    return list(dict.fromkeys(f"{key}=" for key in re.findall(r"^  ([\w.]+) \(", shown.getvalue(), re.MULTILINE)))
