"""EC2: what its metadata server says, and what of it takes the machine."""

from datetime import UTC, datetime

import pytest
from metadata_server import Asked, Reply, nobody, serving

from megatron_bamboo.cloud.asking import Answer, BadAnswer, NoAnswer
from megatron_bamboo.cloud.aws import ACTION_PATH, REBALANCE_PATH, Aws, read_action
from megatron_bamboo.cloud.source import NOTHING, Word
from megatron_bamboo.membership.leaving import Notice

NOW = datetime(2017, 9, 18, 8, 20, 30, tzinfo=UTC)
ACTION = '{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'
REBALANCE = '{"noticeTime": "2017-09-18T08:20:00Z"}'


class Instance:
    """Answers as EC2 does, with the token that holds."""

    def __init__(self, **documents: str) -> None:
        self.token = "token1"
        self.documents = documents

    def __call__(self, asked: Asked) -> Reply:
        match asked.method, asked.path:
            case "PUT", "/latest/api/token":
                assert asked.headers["x-aws-ec2-metadata-token-ttl-seconds"] == "21600"
                return 200, self.token
            case "GET", path if asked.headers.get("x-aws-ec2-metadata-token") == self.token:
                name = {ACTION_PATH: "action", REBALANCE_PATH: "rebalance"}[path]
                text = self.documents.get(name)
                return (404, "Not Found") if text is None else (200, text)
        return 401, "Unauthorized"


def test_an_undisturbed_instance_has_no_notice_and_asks_for_one_token() -> None:
    with serving(Instance()) as server:
        source = Aws(server.client(), lambda: NOW)
        assert source.look() == source.look() == NOTHING
    assert [asked.method for asked in server.asked] == ["PUT", "GET", "GET", "GET", "GET"]


def test_an_interruption_is_a_notice_with_the_time_left() -> None:
    with serving(Instance(action=ACTION, rebalance=REBALANCE)) as server:
        word = Aws(server.client(), lambda: NOW).look()
    cause = "AWS: spot instance, terminate at 2017-09-18T08:22:00Z"
    assert word == Word(Notice(cause, 90.0))


def test_a_rebalance_recommendation_takes_nothing_yet() -> None:
    with serving(Instance(rebalance=REBALANCE)) as server:
        word = Aws(server.client(), lambda: NOW).look()
    assert word == Word(hint="AWS: elevated risk of interruption since 2017-09-18T08:20:00Z")


def test_a_token_that_holds_no_more_is_followed_by_another() -> None:
    instance = Instance()
    with serving(instance) as server:
        source = Aws(server.client(), lambda: NOW)
        source.look()
        instance.token = "token2"
        assert source.look() == NOTHING
    assert [asked.method for asked in server.asked].count("PUT") == 2


def test_a_time_in_the_past_leaves_none() -> None:
    late = datetime(2017, 9, 18, 9, 0, tzinfo=UTC)
    notice = read_action(Answer(200, ACTION.encode()), late)
    assert notice is not None and notice.seconds == 0.0


def test_a_clock_that_is_slow_gives_no_time() -> None:
    """A node would wait for its standby until it is taken."""
    slow = datetime(2017, 9, 18, 3, 0, tzinfo=UTC)
    notice = read_action(Answer(200, ACTION.encode()), slow)
    assert notice is not None and notice.seconds == 120.0


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (200, "<html>log in</html>"),
        (200, '{"action": "dance", "time": "2017-09-18T08:22:00Z"}'),
        (200, '{"action": "stop", "time": "soon"}'),
        (200, "[]"),
        (302, ""),
        (401, ""),
        (500, ACTION),
    ],
)
def test_what_ec2_does_not_say_is_no_notice(status: int, text: str) -> None:
    with pytest.raises(BadAnswer):
        read_action(Answer(status, text.encode()), NOW)


def test_where_every_token_is_refused_the_answer_is_bad() -> None:
    with serving(lambda asked: (403, "Forbidden")) as server, pytest.raises(BadAnswer):
        Aws(server.client()).look()


def test_an_absent_server_gives_no_answer() -> None:
    with pytest.raises(NoAnswer):
        Aws(nobody()).look()
