"""Azure: scheduled events of this machine and of others, and when they may begin."""

import json
from datetime import UTC, datetime

import pytest
from metadata_server import Asked, MetadataServer, Reply, nobody, serving

from megatron_bamboo.cloud.asking import BadAnswer, NoAnswer
from megatron_bamboo.cloud.azure import EVENTS_PATH, NAME_PATH, Azure
from megatron_bamboo.cloud.source import NOTHING, Word
from megatron_bamboo.membership.leaving import Notice

NOW = datetime(2016, 9, 19, 18, 29, 0, tzinfo=UTC)


def event(
    kind: str = "Preempt",
    machines: tuple[str, ...] = ("set_1",),
    not_before: str = "Mon, 19 Sep 2016 18:29:47 GMT",
    number: str = "C7061BAC",
) -> dict[str, object]:
    return {
        "EventId": number,
        "EventType": kind,
        "ResourceType": "VirtualMachine",
        "Resources": list(machines),
        "EventStatus": "Scheduled" if not_before else "Started",
        "NotBefore": not_before,
        "Description": "",
        "EventSource": "Platform",
        "DurationInSeconds": -1,
    }


class Machine:
    """Answers as Azure does, to a machine named ``set_1``."""

    def __init__(self, *events: dict[str, object]) -> None:
        self.events = list(events)

    def __call__(self, asked: Asked) -> Reply:
        if asked.headers.get("metadata") != "true":
            return 400, '{"error": "Bad request. Required metadata header not specified"}'
        match asked.method, asked.path:
            case "GET", path if path == NAME_PATH:
                return 200, "set_1"
            case "GET", path if path == EVENTS_PATH:
                return 200, json.dumps({"DocumentIncarnation": 1, "Events": self.events})
            case "POST", path if path == EVENTS_PATH:
                return 200, ""
        return 404, ""


def source(server: MetadataServer) -> Azure:
    return Azure(server.client(), lambda: NOW)


def word(*events: dict[str, object]) -> Word:
    with serving(Machine(*events)) as server:
        return source(server).look()


def test_a_machine_without_events_has_no_notice() -> None:
    assert word() == NOTHING


@pytest.mark.parametrize(
    ("not_before", "seconds"),
    [
        ("Mon, 19 Sep 2016 18:29:47 GMT", 47.0),
        ("2016-09-19T18:29:47Z", 47.0),
        ("", 0.0),
        ("Mon, 19 Sep 2016 18:20:00 GMT", 0.0),
    ],
)
@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy"])
def test_an_event_that_takes_this_machine_is_a_notice(
    kind: str, not_before: str, seconds: float
) -> None:
    found = word(event(kind, ("set_0", "set_1"), not_before))
    assert found == Word(Notice(f"Azure: {kind}", seconds))


def test_events_of_other_machines_do_nothing() -> None:
    assert word(event(machines=("set_0", "set_11")), event("Freeze", ("set_2",))) == NOTHING


def test_a_freeze_takes_nothing() -> None:
    assert word(event("Freeze")) == Word(hint="Azure: Freeze")


def test_the_first_of_several_counts() -> None:
    later = event("Redeploy", not_before="Mon, 19 Sep 2016 19:00:00 GMT", number="D")
    assert word(later, event()) == Word(Notice("Azure: Preempt", 47.0))


def test_an_event_that_is_cancelled_is_there_no_more() -> None:
    machine = Machine(event())
    with serving(machine) as server:
        azure = source(server)
        assert azure.look().notice is not None
        machine.events.clear()
        assert azure.look() == NOTHING
        azure.acknowledge()
    assert server.paths() == [NAME_PATH, EVENTS_PATH, EVENTS_PATH]


def test_only_events_of_this_machine_alone_are_acknowledged() -> None:
    shared, freeze = event(machines=("set_0", "set_1"), number="A"), event("Freeze", number="B")
    with serving(Machine(shared, freeze, event(number="C"))) as server:
        azure = source(server)
        azure.look()
        azure.acknowledge()
    posted = [json.loads(asked.body) for asked in server.asked if asked.method == "POST"]
    assert posted == [{"StartRequests": [{"EventId": "C"}]}]


@pytest.mark.parametrize(
    "text",
    [
        "<html>",
        "{}",
        '{"Events": {}}',
        '{"Events": [1]}',
        '{"Events": [{"EventId": "A", "EventType": "Preempt"}]}',
        json.dumps({"Events": [event(not_before="soon")]}),
        json.dumps({"Events": [event(not_before="soon, perhaps")]}),
    ],
)
def test_what_azure_does_not_say_is_a_bad_answer(text: str) -> None:
    def answering(asked: Asked) -> Reply:
        return 200, "set_1" if asked.path == NAME_PATH else text

    with serving(answering) as server, pytest.raises(BadAnswer):
        source(server).look()


@pytest.mark.parametrize("status", [302, 400, 410, 500])
def test_another_status_of_azure_is_a_bad_answer(status: int) -> None:
    with serving(lambda asked: (status, "{}")) as server, pytest.raises(BadAnswer):
        source(server).look()


def test_an_absent_server_of_azure_gives_no_answer() -> None:
    with pytest.raises(NoAnswer):
        Azure(nobody()).look()
