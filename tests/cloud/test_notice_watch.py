"""What an agent hears of its machine: each change once, an absent cloud once, a signal for good."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from metadata_server import Asked, Reply, nobody, serving

from megatron_bamboo.cloud.asking import NoAnswer
from megatron_bamboo.cloud.aws import Aws
from megatron_bamboo.cloud.azure import Azure
from megatron_bamboo.cloud.by_file import ByFile
from megatron_bamboo.cloud.gcp import Gcp
from megatron_bamboo.cloud.source import NOTHING, Source, Word
from megatron_bamboo.cloud.watch import NoticeWatch, source_of
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.leaving import Notice

WAIT_SECONDS = 30.0


class Scripted:
    """Says one thing after the other, then the last one for ever."""

    name = "scripted"
    look_seconds = 0.01

    def __init__(self, *words: Word | Exception) -> None:
        self._words = list(words)
        self.acknowledged = threading.Event()

    def look(self) -> Word:
        word = self._words.pop(0) if len(self._words) > 1 else self._words[0]
        if isinstance(word, Exception):
            raise word
        return word

    def acknowledge(self) -> None:
        self.acknowledged.set()


@contextmanager
def watching(source: Source | None) -> Iterator[NoticeWatch]:
    watch = NoticeWatch(source)
    watch.start()
    yield watch
    watch.acknowledge()


def hear(watch: NoticeWatch, number: int) -> list[dict[str, Any]]:
    """The first facts; notices as what they say."""
    facts: list[dict[str, Any]] = []
    until = time.monotonic() + WAIT_SECONDS
    while len(facts) < number and time.monotonic() < until:
        facts += [dict(fact) for fact in watch.take()]
        time.sleep(0.01)
    return [json.loads(fact["notice"]) if "notice" in fact else fact for fact in facts]


TAKEN = Word(Notice("taken", 30.0))


def test_each_change_is_heard_once() -> None:
    later = Word(Notice("taken", 29.0))
    with watching(Scripted(NOTHING, TAKEN, later, NOTHING, TAKEN, TAKEN)) as watch:
        heard = hear(watch, 3)
        time.sleep(0.1)
        assert list(watch.take()) == []
    assert [(one["cause"], one["is_over"]) for one in heard] == [
        ("taken", False),
        ("taken", True),
        ("taken", False),
    ]


@pytest.mark.parametrize("first", [None, 600.0], ids=["unknown", "later"])
def test_a_time_that_comes_nearer_is_heard(first: float | None) -> None:
    """An event is moved; or a file was read before all was written."""
    words = [Word(Notice("taken", seconds)) for seconds in (first, 20.0, 19.9, 60.0)]
    with watching(Scripted(*words)) as watch:
        heard = hear(watch, 2)
        time.sleep(0.1)
        assert list(watch.take()) == []
    assert [one["seconds"] for one in heard] == [first, 20.0]


def test_a_hint_is_said_once_and_is_no_notice() -> None:
    hint = Word(hint="it may come")
    with watching(Scripted(hint, hint, NOTHING)) as watch:
        assert hear(watch, 1) == [{"op": "remark", "text": "it may come; nothing is done about it"}]
        time.sleep(0.1)
        assert list(watch.take()) == []


def test_an_absent_cloud_is_said_once() -> None:
    with watching(Gcp(nobody())) as watch:
        (fact,) = hear(watch, 1)
        time.sleep(0.1)
        assert list(watch.take()) == []
    assert fact["text"].startswith("no notices from gcp (is this such a machine?): 127.0.0.1:")


def test_one_that_is_away_for_a_while_takes_nothing_back() -> None:
    away = NoAnswer("it is away")
    with watching(Scripted(TAKEN, away, away, TAKEN)) as watch:
        notice, remark = hear(watch, 2)
        time.sleep(0.1)
        assert list(watch.take()) == []
    assert notice["cause"] == "taken"
    assert remark["text"] == "no notices from scripted for a while: it is away"


def test_a_signal_holds_whatever_the_cloud_says() -> None:
    with watching(Scripted(TAKEN, *[TAKEN] * 20, NOTHING)) as watch:
        assert hear(watch, 1)[0]["cause"] == "taken"
        watch.signalled("SIGTERM")
        assert [one["cause"] for one in hear(watch, 1)] == ["SIGTERM"]
        time.sleep(0.5)
        assert list(watch.take()) == []


@pytest.mark.parametrize(("word", "is_acknowledged"), [(TAKEN, True), (NOTHING, False)])
def test_who_has_left_acknowledges_its_notice(word: Word, is_acknowledged: bool) -> None:
    source = Scripted(word)
    with watching(source) as watch:
        time.sleep(0.2)
    assert source.acknowledged.is_set() == is_acknowledged
    assert watch is not None


def test_without_a_source_signals_are_heard() -> None:
    with watching(None) as watch:
        watch.signalled("SIGTERM")
        assert hear(watch, 1) == [{"cause": "SIGTERM", "seconds": None, "is_over": False}]


def test_a_notice_of_a_real_server_is_heard() -> None:
    def answering(asked: Asked) -> Reply:
        value = "TRUE" if asked.path.endswith("preempted") else "NONE"
        return 200, value, {"Metadata-Flavor": "Google"}

    with serving(answering) as server, watching(Gcp(server.client())) as watch:
        (notice,) = hear(watch, 1)
    assert (notice["cause"], notice["seconds"]) == ("Google Cloud: preempted", 30.0)


def test_sources_have_names(tmp_path: Path) -> None:
    assert source_of("none", "node1") is None
    kinds = {"aws": Aws, "gcp": Gcp, "azure": Azure}
    assert all(isinstance(source_of(name, "node1"), kind) for name, kind in kinds.items())
    (tmp_path / "node1.notice").write_text("")
    source = source_of(f"file:{tmp_path}/{{node}}.notice", "node1")
    assert isinstance(source, ByFile) and source.look().notice is not None


@pytest.mark.parametrize("text", ["", "ec2", "file:", "AWS", "file"])
def test_a_source_that_is_not_known_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="give aws, gcp, azure, none, or file:PATH"):
        source_of(text, "node1")
