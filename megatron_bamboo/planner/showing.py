"""How a command shows what it has worked out: as tables, as JSON, or as a picture."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from rich.console import Console

from megatron_bamboo.errors import UserError


class Format(StrEnum):
    """The forms that there are."""

    TEXT = "text"  # tables
    JSON = "json"  # all of it, for other programs
    PNG = "png"  # a picture


def add_format_options(parser: argparse.ArgumentParser) -> None:
    """The options that choose a form and a file."""
    add = parser.add_argument
    add("--format", choices=[form.value for form in Format], default=Format.TEXT.value)
    add("--json", action="store_const", const=Format.JSON.value, dest="format", help="as --format")
    add("--output", type=Path, metavar="FILE", help="write to a file; png needs it")


def chosen_format(args: argparse.Namespace) -> Format:
    """The form that was asked for; UserError for a picture without a file."""
    form = Format(args.format)
    if form is Format.PNG and args.output is None:
        raise UserError("--format png needs --output FILE")
    return form


@dataclass(frozen=True, slots=True)
class Showable:
    """What there is to show, in each form."""

    head: Sequence[str]
    """Said in any case."""
    as_json: Callable[[], Any]
    print_below: Callable[[Console], None]
    """What follows the head as text."""
    draw: Callable[[Path], None]
    width: int
    """Columns of what is no terminal."""

    def show(self, form: Format, output: Path | None) -> None:
        """Print it, or write it to a file and print only the head.

        Raises:
            UserError: the file cannot be written.
        """
        if output is None:
            self._write(form, Console(width=None if sys.stdout.isatty() else self.width))
            return
        try:
            if form is Format.PNG:
                self.draw(output)
            else:
                with output.open("w", encoding="utf-8") as file:
                    self._write(form, Console(file=file, width=self.width))
        except OSError as error:
            raise UserError(f"--output {output}: {error}") from error
        sys.stdout.write("".join(f"{line}\n" for line in self.head))

    def _write(self, form: Format, console: Console) -> None:
        if form is Format.JSON:
            console.file.write(json.dumps(self.as_json()) + "\n")
            return
        print_lines(console, self.head)
        self.print_below(console)


def print_lines(console: Console, lines: Iterable[str]) -> None:
    """Lines as they are, however long."""
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)
