"""What is said of those who are turned away is bounded, however many they are."""

from megatron_bamboo.membership.strangers import LINE_SECONDS, MOST_ADDRESSES, MOST_LINES, Strangers


class Log:
    """Keeps the lines; its time is what a test says."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.time = 0.0
        self.strangers = Strangers(self.lines.append, lambda: self.time)


def test_an_address_is_named_once_a_minute_with_the_number_of_all() -> None:
    log = Log()
    for _ in range(1000):
        log.strangers.turned_away("10.0.0.1", "rubbish")
    log.strangers.turned_away("10.0.0.2", "too late")
    log.time = LINE_SECONDS + 1
    log.strangers.turned_away("10.0.0.1", "rubbish again")
    assert log.lines == [
        "turned away 10.0.0.1: 'rubbish'",
        "turned away 10.0.0.2: 'too late'",
        "turned away 10.0.0.1: 'rubbish again' (999 more since it was last named)",
    ]
    assert log.strangers.number == 1002


def test_many_addresses_fill_neither_log_nor_memory() -> None:
    log = Log()
    for number in range(3 * MOST_ADDRESSES):
        log.strangers.turned_away(f"10.0.{number // 256}.{number % 256}", "rubbish")
    assert len(log.lines) == MOST_LINES
    log.time = LINE_SECONDS + 1
    log.strangers.turned_away("10.0.11.255", "rubbish")
    assert log.lines[MOST_LINES:] == [
        "turned away 10.0.11.255: 'rubbish' (1 more since it was last named)"
    ]
    assert len(log.strangers._named) + len(log.strangers._unnamed) <= 2 * MOST_ADDRESSES


def test_what_a_stranger_sends_is_one_short_line() -> None:
    log = Log()
    log.strangers.turned_away("10.0.0.1", "a\n\x1b[2J" + "x" * 10_000)
    (line,) = log.lines
    assert "\n" not in line and "\x1b" not in line and len(line) < 1000
