"""Amazon EC2: the interruption of a spot instance, two minutes before it.

``spot/instance-action`` is not there (404) until the instance is to be stopped, hibernated or
terminated; then it holds ``{"action": "terminate", "time": "2017-09-18T08:22:00Z"}``. It should be
asked every 5 seconds. ``events/recommendations/rebalance`` may be there before,
``{"noticeTime": "2020-10-27T08:22:00Z"}``: an elevated risk, with which nothing is decided yet.
Both by IMDSv2: a token comes from a PUT, and whoever is answered 401 needs another.

docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html,
rebalance-recommendations.html and configuring-instance-metadata-service.html there.
"""

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from megatron_bamboo.cloud.asking import Answer, BadAnswer, Server
from megatron_bamboo.cloud.source import Word
from megatron_bamboo.membership.leaving import Notice

TOKEN_PATH = "/latest/api/token"
TOKEN_SECONDS = 21600
ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
LONGEST_SECONDS = 120.0
"""A notice never comes earlier; where more seem to be left this machine's clock is slow."""
ACTIONS = ("terminate", "stop", "hibernate")


class Aws:
    """The metadata server of an EC2 instance."""

    name = "aws"
    look_seconds = 5.0

    def __init__(
        self,
        server: Server = Server(),  # noqa: B008
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._server = server
        self._now = now
        self._token = ""

    def look(self) -> Word:
        """Whether the instance is to be interrupted."""
        notice = read_action(self._get(ACTION_PATH), self._now())
        if notice is not None:
            return Word(notice)
        return Word(hint=read_rebalance(self._get(REBALANCE_PATH)))

    def acknowledge(self) -> None:
        """Nobody asks for it."""

    def _get(self, path: str) -> Answer:
        answer = self._with_token(path) if self._token else Answer(401, b"")
        if answer.status == 401:
            self._token = self._new_token()
            answer = self._with_token(path)
        return answer

    def _with_token(self, path: str) -> Answer:
        return self._server.ask(path, {"X-aws-ec2-metadata-token": self._token})

    def _new_token(self) -> str:
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_SECONDS)}
        answer = self._server.ask(TOKEN_PATH, headers, method="PUT")
        token = answer.text()
        if answer.status != 200 or not token or not token.isprintable():
            raise BadAnswer(f"a token was answered with status {answer.status}")
        return token


def read_action(answer: Answer, now: datetime) -> Notice | None:
    """What ``spot/instance-action`` says.

    Raises:
        BadAnswer: it is neither there nor not there.
    """
    match _content(answer, "spot/instance-action"):
        case None:
            return None
        case {"action": str(action), "time": str(time)} if action in ACTIONS:
            left = (_time(time) - now).total_seconds()
            # A time in the past: it may be taken at any moment.
            seconds = min(max(0.0, left), LONGEST_SECONDS)
            return Notice(f"AWS: spot instance, {action} at {time}", seconds)
        case other:
            raise BadAnswer(f"spot/instance-action is {other}")


def read_rebalance(answer: Answer) -> str:
    """What ``events/recommendations/rebalance`` says; empty if there is nothing."""
    match _content(answer, "events/recommendations/rebalance"):
        case None:
            return ""
        case {"noticeTime": str(time)}:
            return f"AWS: elevated risk of interruption since {time}"
        case other:
            raise BadAnswer(f"events/recommendations/rebalance is {other}")


def _content(answer: Answer, what: str) -> Any:
    if answer.status == 404:
        return None
    if answer.status != 200:
        raise BadAnswer(f"{what} was answered with status {answer.status}")
    return answer.json(what)


def _time(text: str) -> datetime:
    try:
        time = datetime.fromisoformat(text)
    except ValueError as error:
        raise BadAnswer(f"{text} is no time") from error
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
