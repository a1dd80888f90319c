"""Compute Engine: what its metadata server says, and what of it takes the machine."""

import pytest
from metadata_server import Asked, Reply, nobody, serving

from megatron_bamboo.cloud.asking import BadAnswer, NoAnswer
from megatron_bamboo.cloud.gcp import ROOT, Gcp
from megatron_bamboo.cloud.source import NOTHING, Word
from megatron_bamboo.membership.leaving import Notice

GOOGLE = {"Metadata-Flavor": "Google"}


def instance(preempted: str = "FALSE", maintenance: str = "NONE") -> Gcp:
    """What is said of an instance, and a check of how it was asked."""

    def answering(asked: Asked) -> Reply:
        if asked.headers.get("metadata-flavor") != "Google":
            return 403, "Missing Metadata-Flavor:Google header."
        assert asked.headers["host"] == "metadata.google.internal"
        values = {f"{ROOT}preempted": preempted, f"{ROOT}maintenance-event": maintenance}
        return 200, values[asked.path], GOOGLE

    with serving(answering) as server:
        source = Gcp(server.client())
        source.word = source.look()  # type: ignore[attr-defined]
    return source


def word(preempted: str = "FALSE", maintenance: str = "NONE") -> Word:
    found = instance(preempted, maintenance).word  # type: ignore[attr-defined]
    assert isinstance(found, Word)
    return found


def test_an_undisturbed_instance_has_no_notice() -> None:
    assert word() == NOTHING


@pytest.mark.parametrize("maintenance", ["NONE", "MIGRATE_ON_HOST_MAINTENANCE"])
def test_a_preemption_is_a_notice(maintenance: str) -> None:
    assert word("TRUE", maintenance) == Word(Notice("Google Cloud: preempted", 30.0))


def test_maintenance_that_ends_the_machine_is_a_notice() -> None:
    wanted = Word(Notice("Google Cloud: host maintenance", 60.0))
    assert word(maintenance="TERMINATE_ON_HOST_MAINTENANCE") == wanted


def test_a_live_migration_takes_nothing() -> None:
    found = word(maintenance="MIGRATE_ON_HOST_MAINTENANCE")
    assert found == Word(hint="Google Cloud: it is migrated alive")


@pytest.mark.parametrize("text", ["", "true", "<html>", "MAYBE"])
def test_another_value_is_no_answer_of_google(text: str) -> None:
    with pytest.raises(BadAnswer):
        word(preempted=text)
    with pytest.raises(BadAnswer):
        word(maintenance=text)


@pytest.mark.parametrize(
    "reply", [(200, "TRUE"), (302, "TRUE", GOOGLE), (503, "", GOOGLE), (404, "", GOOGLE)]
)
def test_who_is_not_google_is_not_believed(reply: Reply) -> None:
    with serving(lambda asked: reply) as server, pytest.raises(BadAnswer):
        Gcp(server.client()).look()


def test_an_absent_server_of_google_gives_no_answer() -> None:
    with pytest.raises(NoAnswer):
        Gcp(nobody()).look()
