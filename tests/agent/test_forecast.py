"""What is expected from what was seen, and that each answer is said once."""

from pathlib import Path

from megatron_bamboo.agent.forecast import Forecast
from megatron_bamboo.observe.events import EventLog, read_events
from megatron_bamboo.recovery.outlook import Weighing


def test_who_has_seen_much_come_and_go_expects_the_next_of_it_sooner(tmp_path: Path) -> None:
    times = [0.0]
    calm, busy = (Forecast(EventLog(tmp_path, name), lambda: times[0]) for name in ("a", "b"))
    times[0] = 600.0
    busy.saw(20)
    times[0] = 1200.0
    assert busy.expected_seconds < calm.expected_seconds


def test_an_answer_is_said_once_and_again_when_it_is_another(tmp_path: Path) -> None:
    forecast = Forecast(EventLog(tmp_path, "coordinator"), lambda: 0.0)
    gain, loss = Weighing(100.0, 2.0, 1.0, 0.0, 1.0), Weighing(100.0, 1.0, 1.0, 0.0, 1.0)
    weighed = (gain, gain, loss, gain)
    answers = [forecast.pays("new_cut", 3, "that one", one, wanted="it") for one in weighed]
    assert answers == [True, True, False, True]
    said = [e for e in read_events(tmp_path) if e["event"] == "new_cut"]
    assert [e["pays"] for e in said] == [True, False, True]
    assert {(e["epoch"], e["wanted"]) for e in said} == {(3, "it")}
    assert said[0]["changed"] > said[0]["unchanged"] == 50.0
