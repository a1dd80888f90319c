"""Reading JSON lines, with errors that name the file and the line."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_bamboo.errors import UserError


def read_lines(path: Path, flag: str = "--input") -> Iterator[tuple[str, str]]:
    """Pairs of ("file, line n", the line) for each line that is not blank."""
    if not path.is_file():
        raise UserError(f"{flag}: no such file: {path}")
    try:
        with path.open(encoding="utf-8") as stream:
            for number, line in enumerate(stream, start=1):
                if line.strip():
                    yield f"{path}, line {number}", line
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error}") from error


def texts_of_line(where: str, line: str, keys: Sequence[str]) -> dict[str, list[str]]:
    """The texts under each key of one line; a list of texts stays one, as sentences."""
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({error}); each line must be one object") from error
    if not isinstance(record, dict):
        raise UserError(f"{where}: not a JSON object")
    return {key: _texts(where, record, key) for key in keys}


def _texts(where: str, record: dict[str, object], key: str) -> list[str]:
    value = record.get(key)
    match value:
        case str():
            return [value]
        case list() if all(isinstance(text, str) for text in value):
            return value
        case _:
            raise UserError(f"{where}: no text under {key!r}; name another with --json-keys")
