"""Reads Megatron's flags into options.

What Megatron has and this project does not support yet is refused by name, so that nothing ever
trains silently wrong.
"""

import argparse
import dataclasses
import difflib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_bamboo.config.options import Options, flag_of, value_type
from megatron_bamboo.errors import UserError

# Flags of Megatron-LM that its users know and that would train something else if ignored.
UNSUPPORTED: Mapping[str, str] = {
    "--context-parallel-size": "context parallelism",
    "--expert-model-parallel-size": "expert parallelism",
    "--num-experts": "mixtures of experts",
    "--num-virtual-stages-per-pipeline-rank": "interleaving by the number of chunks",
    "--overlap-grad-reduce": "overlapped gradient reduction",
    "--overlap-param-gather": "overlapped parameter gather",
    "--async-save": "saving while the training goes on",
    "--no-save-optim": "a checkpoint without optimizer state",
    "--no-load-optim": "going on without optimizer state",
    "--no-save-rng": "a choice about random state (there is none to save)",
    "--no-load-rng": "a choice about random state (there is none to load)",
    "--finetune": "taking only the weights of a checkpoint",
    "--pretrained-checkpoint": "taking only the weights of a checkpoint",
    "--use-checkpoint-args": "taking options from a checkpoint",
    "--use-dist-ckpt": "another word for --ckpt-format torch_dist, which is always used,",
    "--use-checkpoint-opt_param-scheduler": "the learning rate's course from a checkpoint",
    "--override-opt_param-scheduler": "a choice about the learning rate (these flags always hold)",
    "--save-retain-interval": "removing older checkpoints",
    "--non-persistent-save-interval": "a second kind of checkpoints",
    "--exit-interval": "an end before --train-iters",
    "--exit-duration-in-mins": "an end before --train-iters",
    "--exit-signal-handler": "saving at a signal",
    "--rampup-batch-size": "a growing batch",
    "--train-samples": "a run length in samples",
    "--group-query-attention": "grouped-query attention",
    "--reset-position-ids": "positions that start anew at each document",
    "--reset-attention-mask": "attention that ends at documents",
    "--eod-mask-loss": "masking the end of documents",
    "--log-interval": "another log interval than every iteration",
}


# Values of these with which nothing else would be trained.
HARMLESS: Mapping[str, list[str]] = {
    "--context-parallel-size": ["1"],
    "--expert-model-parallel-size": ["1"],
    "--log-interval": ["1"],
}
_REFUSED = "refused flags"

ExtraArgsProvider = Callable[[argparse.ArgumentParser], argparse.ArgumentParser]
"""Megatron's: adds a script's own flags to the parser and gives it back."""


def parse_options(argv: Sequence[str]) -> Options:
    """Read Megatron's flags.

    Raises:
        UserError: with one line that names the bad flag.
    """
    return parse_flags(argv)[0]


def parse_flags(
    argv: Sequence[str],
    extra_args_provider: ExtraArgsProvider | None = None,
    args_defaults: Mapping[str, Any] = types.MappingProxyType({}),
) -> tuple[Options, dict[str, Any]]:
    """Read Megatron's flags and a script's own, which come apart.

    Args:
        args_defaults: values of options that the flags do not give, by the options' names.

    Raises:
        UserError: with one line that names the bad flag.
    """
    parser: argparse.ArgumentParser = _Parser(allow_abbrev=False)
    groups = {field.name: _option_class(field) for field in dataclasses.fields(Options)}
    for option_class in groups.values():
        _add_group(parser, option_class)
    for flag in UNSUPPORTED:
        parser.add_argument(flag, action=_Refuse, nargs="*", help=argparse.SUPPRESS)
    own = {action.dest for action in parser._actions}
    parser = _extend(parser, extra_args_provider)
    _set_defaults(parser, args_defaults)
    known, unknown = parser.parse_known_args(list(argv))
    if unknown:
        raise UserError(_unknown_flag(unknown[0], parser))
    values = vars(known)
    if refused := values.pop(_REFUSED, None):
        raise UserError(_refusal(list(dict.fromkeys(refused))))
    options = Options(
        **{
            name: option_class(**{f.name: values[f.name] for f in dataclasses.fields(option_class)})
            for name, option_class in groups.items()
        }
    )
    return options, {name: value for name, value in values.items() if name not in own}


def _extend(
    parser: argparse.ArgumentParser, extra_args_provider: ExtraArgsProvider | None
) -> argparse.ArgumentParser:
    if extra_args_provider is None:
        return parser
    try:
        return extra_args_provider(parser)
    except argparse.ArgumentError as error:  # a flag of a name that is taken
        raise UserError(f"the script's extra_args_provider: {error}") from error


def _set_defaults(parser: argparse.ArgumentParser, defaults: Mapping[str, Any]) -> None:
    actions = {action.dest: action for action in parser._actions}
    for name, value in defaults.items():
        if name not in actions:
            raise UserError(f"the script's args_defaults: there is no option {name}")
        actions[name].required = False
        parser.set_defaults(**{name: value})


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the list of all flags before it."""

    def error(self, message: str) -> typing.NoReturn:
        raise UserError(message)


class _Refuse(argparse.Action):
    """Notes a flag that is not supported, unless its value asks for what happens anyway."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = self.option_strings[0]
        if list(values) != HARMLESS.get(flag):
            setattr(namespace, _REFUSED, [*getattr(namespace, _REFUSED, []), flag])


def _refusal(flags: Sequence[str]) -> str:
    if len(flags) == 1:
        return f"{flags[0]}: {UNSUPPORTED[flags[0]]} is not supported yet; leave the flag out"
    each = ", ".join(f"{flag} ({UNSUPPORTED[flag]})" for flag in flags)
    return f"not supported yet, leave these flags out: {each}"


def _unknown_flag(word: str, parser: argparse.ArgumentParser) -> str:
    if not word.startswith("--"):
        return f"{word} is neither a flag nor the value of one"
    flag = word.partition("=")[0]
    flags = [name for action in parser._actions for name in action.option_strings]
    near = difflib.get_close_matches(flag, flags, n=1)
    return f"there is no flag {flag}" + (f"; did you mean {near[0]}?" if near else "")


def _add_group(parser: argparse.ArgumentParser, option_class: type) -> None:
    group = parser.add_argument_group(str(option_class.__doc__))
    for field in dataclasses.fields(option_class):
        help_text = field.metadata["help"]
        if value_type(field) is bool:
            group.add_argument(flag_of(field.name), action="store_true", help=help_text)
            continue
        required = field.default is dataclasses.MISSING
        group.add_argument(
            flag_of(field.name),
            type=value_type(field),
            required=required,
            default=None if required else field.default,
            choices=tuple(value_type(field)(c) for c in field.metadata["choices"]) or None,
            help=help_text if required or field.default is None else f"{help_text} (%(default)s)",
        )


def _option_class(field: dataclasses.Field[Any]) -> type:
    assert isinstance(field.type, type)
    return field.type
