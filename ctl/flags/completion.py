"""The command ``ctl completion``: prints a script with which a shell completes commands and flags.

The words are those of every ``--help``, which this command reads once. So the script answers a TAB
without starting Python.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

from ctl.base.names import check_name
from ctl.errors import UsageError
from ctl.flags.parsing import run_command

_USAGE = """
Prints a script that completes commands, flags, the choices of a flag, and files.

  python -m ctl completion bash >~/.ctl.bash && echo 'source ~/.ctl.bash' >>~/.bashrc
  python -m ctl completion zsh >~/.ctl.zsh && echo 'source ~/.ctl.zsh' >>~/.zshrc
  python -m ctl completion fish >~/.config/fish/conf.d/ctl.fish

Run it again after an update of ctl. It is for ctl, ctl-train, ctl-evaluate, ctl-launch and
ctl-inspect, not for `python -m ctl`.
"""

# `_ctl_words COMMAND` prints what may follow: sub-commands; --flag, --noflag; --flag= and each
# --flag=choice. In bash, `=` begins a word: the reply is what follows it. In fish, it is the whole
# word, without a space after a `=`; where there is none, fish completes files.
_SCRIPTS = {
    "bash": r"""
_ctl() {
    local line=${COMP_LINE:0:$COMP_POINT} key=${COMP_WORDS[0]##*/} each words
    local word=${line##* }
    key=${key/-/ }
    for each in ${line% *}; do
        [ -n "$(_ctl_words "$key $each")" ] && key="$key $each"
    done
    words=$(_ctl_words "$key")
    if [[ $word == --*=* ]]; then
        COMPREPLY=($(compgen -W "$words" -X '*=' -- "$word"))
        [[ $COMP_WORDBREAKS != *=* ]] || COMPREPLY=("${COMPREPLY[@]#*=}")
    else
        COMPREPLY=($(compgen -W "$words" -X '*=?*' -- "$word"))
        [[ ${COMPREPLY[*]} != *= ]] || compopt -o nospace
    fi
}
complete -o default -F _ctl {commands}
""",
    "zsh": r"""
_ctl() {
    local key=${${words[1]:t}/-/ } each
    for each in ${words[2,CURRENT-1]}; do
        [[ -n $(_ctl_words "$key $each") ]] && key="$key $each"
    done
    local -a all=($(_ctl_words $key)) choices
    if [[ $PREFIX == --*=* ]]; then
        choices=(${(M)all:#${PREFIX%%=*}=?*})
        compset -P '*='
        if (($#choices)); then compadd -- ${choices#*=}; else _files; fi
    else
        all=(${all:#*=?*})
        compadd -- ${all:#*=}
        compadd -S '' -- ${(M)all:#*=}
        (($compstate[nmatches])) || _files
    fi
}
(($+functions[compdef])) || { autoload -U compinit && compinit; }
compdef _ctl {commands}
""",
    "fish": r"""
function _ctl
    set -l line (commandline -opc)
    set -l key (string replace -- - ' ' (string replace -r -- '.*/' '' $line[1]))
    for each in $line[2..-1]
        set -l found (_ctl_words "$key $each")
        set -q found[1]; and set key "$key $each"
    end
    set -l start (commandline -ct | string escape --style=regex)
    if string match -q -- '*=*' "$start"
        _ctl_words $key | string split ' ' | string match -r -- "^$start.+"
    else
        _ctl_words $key | string split ' ' | string match -rv '=.' | string match -r -- "^$start.*"
    end
end
for each in {commands}
    complete -c $each -f -n '_ctl >/dev/null' -a '(_ctl)'
end
""",
}
# How a shell writes `_ctl_words`: its beginning, each command, and its end.
_POSIX = ("_ctl_words() {\n    case $1 in", '        "{key}") echo "{words}" ;;', "    esac\n}")
_FISH = (
    "function _ctl_words\n    switch $argv[1]",
    '        case "{key}"\n            echo "{words}"',
    "    end\nend",
)
_COMMANDS = "ctl ctl-train ctl-evaluate ctl-launch ctl-inspect"

_COMMAND = re.compile(r"^  (\w+)  +\S", re.MULTILINE)
_FLAG = re.compile(r"^  --(\[no\])?(\w+)(?:=(\S+))?$", re.MULTILINE)


def run() -> None:
    """The command line."""
    run_command(main, _USAGE, takes_command=True)


def main(shells: Sequence[str]) -> None:
    """Prints the script for the one shell that is named."""
    if len(shells) != 1:
        raise UsageError(f"give one shell: {', '.join(_SCRIPTS)}")
    (shell,) = shells
    check_name("shell", shell, _SCRIPTS)
    begin, case, end = _FISH if shell == "fish" else _POSIX
    cases = [case.format(key=key, words=" ".join(words)) for key, words in _words(["ctl"])]
    print("\n".join([begin, *cases, end]))
    print(_SCRIPTS[shell].replace("{commands}", _COMMANDS).strip())


def _words(command: list[str]) -> list[tuple[str, list[str]]]:
    """The words that may follow ``command``, and so for its sub-commands, from their ``--help``."""
    python = [sys.executable, "-m", *command, "--help"]
    text = subprocess.run(python, capture_output=True, text=True, check=True).stdout
    commands, words = _COMMAND.findall(text), []
    for is_boolean, name, choices in _FLAG.findall(text):
        words += [f"--{name}", f"--no{name}"] if is_boolean else [f"--{name}="]
        words += [f"--{name}={choice}" for choice in choices.split("|") if choices]
    found = [(" ".join(command), [*commands, *words])]
    return found + [entry for name in commands for entry in _words([*command, name])]
