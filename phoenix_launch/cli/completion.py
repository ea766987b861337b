"""The completion verb: static scripts for bash, zsh and fish, made from the verbs and the table of options."""

from __future__ import annotations

from typing import Final

import click

from phoenix_launch.cli.command import DEFAULT_VERB, VERBS, Command, load
from phoenix_launch.cli.inject_fault import KINDS
from phoenix_launch.errors import EXIT_OK, UsageError
from phoenix_launch.options.table import BY_FIELD

FILES: Final = {"bash": "phoenix-run.bash", "zsh": "_phoenix-run", "fish": "phoenix-run.fish"}
_JOBS: Final = '"${PHOENIX_HOME:-${XDG_STATE_HOME:-$HOME/.local/state}/phoenix}/jobs"'
_WITH_JOB: Final = ("status", "logs", "stop", "resume")  # JOB is their argument
_THEN_JOB: Final = ("inject-fault",)  # JOB follows the first argument
_VALUE_OPTIONAL: Final = ("prune",)  # options that also stand alone
_WITH_OPTIONS: Final = (DEFAULT_VERB, "config")  # SCRIPT and its arguments follow


def completion(shell: str) -> int:
    """Print the completion script of a shell: bash, zsh or fish.

    For this session: eval "$(phoenix-run completion bash)", or phoenix-run completion fish | source.
    """
    if shell not in FILES:
        raise UsageError(f"there is no completion for {shell!r}", hint=f"one of {', '.join(FILES)}")
    print(script(shell), end="")
    return EXIT_OK


def script(shell: str) -> str:
    return {"bash": _bash, "zsh": _zsh, "fish": _fish}[shell]()


def _options(verb: str) -> list[click.Option]:
    return [param for param in load(verb).params if isinstance(param, click.Option)]


def _words(option: click.Option) -> tuple[str, ...]:
    """The values that can be named."""
    row = BY_FIELD.get(option.name or "")
    return row.value.choices if row else ()


def _help(option: click.Option) -> str:
    row = BY_FIELD.get(option.name or "")
    return row.help if row else (option.help or "show this and exit")


def _arguments(verb: str) -> tuple[str, ...]:
    """Words that can stand for a verb's first argument, where they are known."""
    return {"inject-fault": KINDS, "completion": tuple(FILES)}.get(verb, ())


# --- bash ------------------------------------------------------------------------------------------------------------

_BASH: Final = """\
# bash completion of phoenix-run; made by `phoenix-run completion bash`

_phoenix_run_jobs() {{
    ls -- {jobs} 2>/dev/null
}}

_phoenix_run() {{
    local word=${{COMP_WORDS[COMP_CWORD]}} previous=${{COMP_WORDS[COMP_CWORD - 1]}} verb=run first=1 position options
    local typed=" ${{COMP_WORDS[*]:0:COMP_CWORD}} "
    COMPREPLY=()
    case ${{COMP_WORDS[1]}} in
        {verbs}) ((COMP_CWORD > 1)) && verb=${{COMP_WORDS[1]}} first=2 ;;
    esac
    local valued=" {valued} "
    case $verb in
        run | config)
            for ((position = first; position < COMP_CWORD; position++)); do
                if [[ ${{COMP_WORDS[position]}} == -* ]]; then
                    [[ $valued == *" ${{COMP_WORDS[position]//_/-}} "* ]] && ((position++))
                else
                    COMPREPLY=($(compgen -f -- "$word")) # an argument of the script
                    return
                fi
            done
            ;;
    esac
    case ${{previous//_/-}} in
{values}
        --hostfile | --log-dir) COMPREPLY=($(compgen -f -- "$word")); return ;;
        --job) COMPREPLY=($(compgen -W "$(_phoenix_run_jobs)" -- "$word")); return ;;
    esac
    [[ $valued == *" $previous "* ]] && return
    case $verb in
{options}
    esac
    if [[ $word == -* ]]; then
        COMPREPLY=($(compgen -W "$options --help" -- "$word"))
        return
    fi
    case $verb in
        {with_job}) COMPREPLY=($(compgen -W "$(_phoenix_run_jobs)" -- "$word")) ;;
{arguments}
        run)
            COMPREPLY=($(compgen -f -- "$word"))
            ((COMP_CWORD == 1)) && COMPREPLY+=($(compgen -W "{verb_words}" -- "$word"))
            ;;
        config) COMPREPLY=($(compgen -f -- "$word")) ;;
    esac
}}

complete -o filenames -F _phoenix_run phoenix-run
"""
_COMPGEN: Final = 'COMPREPLY=($(compgen -W "{}" -- "$word"))'


def _bash() -> str:
    run_options = _options(DEFAULT_VERB)
    valued = [name for verb in VERBS for option in _options(verb) if not option.is_flag for name in option.opts]
    values = [
        f"        {' | '.join(option.opts)}) {_COMPGEN.format(' '.join(_words(option)))}; return ;;"
        for option in run_options
        if _words(option)
    ]
    options = [f'        {verb}) options="{" ".join(_flags(verb))}" ;;' for verb in VERBS]
    arguments = [line for verb in VERBS if _arguments(verb) for line in _bash_arguments(verb)]
    return _BASH.format(
        jobs=_JOBS,
        verbs=" | ".join(VERBS),
        verb_words=" ".join(VERBS),
        valued=" ".join(dict.fromkeys(valued)),
        values="\n".join(values),
        options="\n".join(options),
        with_job=" | ".join(_WITH_JOB),
        arguments="\n".join(arguments),
    )


def _bash_arguments(verb: str) -> list[str]:
    words = _COMPGEN.format(" ".join(_arguments(verb)))
    if verb not in _THEN_JOB:
        return [f"        {verb}) {words} ;;"]
    jobs = _COMPGEN.format("$(_phoenix_run_jobs)")
    seen = " | ".join(f'*" {word} "*' for word in _arguments(verb))
    return [
        f"        {verb})",
        "            case $typed in",
        f"                {seen}) {jobs} ;;",
        f"                *) {words} ;;",
        "            esac",
        "            ;;",
    ]


def _flags(verb: str) -> list[str]:
    return [name for option in _options(verb) for name in option.opts if name.startswith("--")]


# --- zsh -------------------------------------------------------------------------------------------------------------

_ZSH: Final = """\
#compdef phoenix-run
# zsh completion of phoenix-run; made by `phoenix-run completion zsh`

_phoenix_run_jobs() {{
    local -a jobs
    jobs=({jobs}/*(N:t))
    _describe job jobs
}}

_phoenix_run_start() {{
    local -a verbs
    verbs=(
{verbs}
    )
    ((CURRENT == 2)) && _describe verb verbs
    _files
}}

_phoenix_run() {{
    local verb=run
    case $words[2] in
        {verb_pattern})
            if ((CURRENT > 2)); then
                verb=$words[2]
                shift words
                ((CURRENT--))
            fi
            ;;
    esac
    case $verb in
{cases}
    esac
}}

_phoenix_run "$@"
"""


def _zsh() -> str:
    cases = []
    for verb in VERBS:
        lines = [f"            {_zsh_option(option)}" for option in _options(verb)]
        lines += [f"            '(-)'{{-h,--help}}'[show this and exit]'", *_zsh_arguments(verb)]  # noqa: F541
        body = " \\\n".join(lines)
        cases.append(f"        {verb})\n            _arguments -S \\\n{body}\n            ;;")
    return _ZSH.format(
        jobs=_JOBS,
        verbs="\n".join(f"        {_quoted(f'{verb}:{text}')}" for verb, text in VERBS.items()),
        verb_pattern=" | ".join(VERBS),
        cases="\n".join(cases),
    )


def _zsh_option(option: click.Option) -> str:
    text = _help(option).replace("[", "(").replace("]", ")").replace(":", "\\:")
    repeat = "*" if option.multiple else ""
    long = next(name for name in option.opts if name.startswith("--"))
    if option.is_flag:
        value = ""
    elif words := _words(option):
        value = f":value:({' '.join(words)})"
    else:
        value = ":value:" + {"hostfile": "_files", "log_dir": "_files -/", "named": "_phoenix_run_jobs"}.get(
            option.name or "", ""
        )
        value = ":" + value if option.name in _VALUE_OPTIONAL else value
    equals = "" if option.is_flag else "="
    described = _quoted(f"{repeat}{long}{equals}[{text}]{value}")
    shorts = [name for name in option.opts if not name.startswith("--")]
    return " ".join([described, *(_quoted(f"{short}[{text}]{value}") for short in shorts)])


def _zsh_arguments(verb: str) -> list[str]:
    if verb in _WITH_JOB:
        return ["            '1:job:_phoenix_run_jobs'"]
    if words := _arguments(verb):
        job = ["            '2:job:_phoenix_run_jobs'"] if verb in _THEN_JOB else []
        return [f"            '1:word:({' '.join(words)})'", *job]
    if verb in _WITH_OPTIONS:
        return ["            '1:script:_phoenix_run_start'", "            '*::argument:_files'"]
    return []


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


# --- fish ------------------------------------------------------------------------------------------------------------


def _fish() -> str:
    verbs = " ".join(VERBS)
    lines = [
        "# fish completion of phoenix-run; made by `phoenix-run completion fish`",
        "",
        "function __phoenix_run_verb",
        "    set -l words (commandline -opc)",
        f"    if test (count $words) -gt 1; and contains -- $words[2] {verbs}",
        "        echo $words[2]",
        "    else",
        f"        echo {DEFAULT_VERB}",
        "    end",
        "end",
        "",
        "function __phoenix_run_jobs",
        f"    set -l home {_fish_home()}",
        "    ls -- $home/jobs 2>/dev/null",
        "end",
        "",
    ]
    for verb, text in VERBS.items():
        only = "'test (count (commandline -opc)) -eq 1'"
        lines.append(f"complete -c phoenix-run -n {only} -a {verb} -d {_fish_quoted(text)}")
    for verb in VERBS:
        when = f"'test (__phoenix_run_verb) = {verb}'"
        start = f"complete -c phoenix-run -n {when}"
        lines += [f"{start} {_fish_option(option)}" for option in _options(verb)]
        lines.append(f"{start} -s h -l help -d 'show this and exit'")
        if verb in _WITH_JOB:
            lines.append(f"{start} -f -a '(__phoenix_run_jobs)'")
        elif words := _arguments(verb):
            if verb in _THEN_JOB:
                seen = f"__fish_seen_subcommand_from {' '.join(words)}"
                lines.append(f"{start[:-1]}; and {seen}' -f -a '(__phoenix_run_jobs)'")
                start = f"{start[:-1]}; and not {seen}'"
            lines.append(f"{start} -f -a '{' '.join(words)}'")
        elif verb not in _WITH_OPTIONS:
            lines.append(f"{start} -f")
    return "\n".join(lines) + "\n"


def _fish_home() -> str:
    return (
        "(set -q PHOENIX_HOME; and echo $PHOENIX_HOME; "
        "or set -q XDG_STATE_HOME; and echo $XDG_STATE_HOME/phoenix; or echo ~/.local/state/phoenix)"
    )


def _fish_option(option: click.Option) -> str:
    parts = []
    for name in option.opts:
        parts.append(f"-l {name[2:]}" if name.startswith("--") else f"-s {name[1:]}")
    if not option.is_flag and option.name not in _VALUE_OPTIONAL:
        parts.append("-r" if option.name in ("hostfile", "log_dir") else "-x")
    if words := _words(option):
        parts.append(f"-a '{' '.join(words)}'")
    if option.name == "named":
        parts.append("-a '(__phoenix_run_jobs)'")
    return " ".join([*parts, f"-d {_fish_quoted(_help(option))}"])


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


command = Command("completion", completion, [click.Argument(["shell"])])
