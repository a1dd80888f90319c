"""Google Compute Engine: the preemption of a spot instance, half a minute before it.

``instance/preempted`` is ``FALSE`` until then, and ``TRUE`` for good.
``instance/maintenance-event`` is ``NONE``, ``MIGRATE_ON_HOST_MAINTENANCE`` (the machine moves alive
and is not taken) or ``TERMINATE_ON_HOST_MAINTENANCE`` (as for all with a GPU), a minute before; it
must have been asked once to come in time. Every answer has the header ``Metadata-Flavor: Google``,
as every question must. Both are asked once a second: ``wait_for_change`` would tell of one of them
alone. By address, since where the server is absent its name would have to be looked for.

cloud.google.com/compute/docs/instances/create-use-preemptible,
cloud.google.com/compute/docs/metadata/getting-live-migration-notice and querying-metadata there.
"""

from megatron_bamboo.cloud.asking import Answer, BadAnswer, Server
from megatron_bamboo.cloud.source import NOTHING, Word
from megatron_bamboo.membership.leaving import Notice

ROOT = "/computeMetadata/v1/instance/"
FLAVOR = "Metadata-Flavor"
HEADERS = {FLAVOR: "Google", "Host": "metadata.google.internal"}
PREEMPTION_SECONDS = 30.0
MAINTENANCE_SECONDS = 60.0


class Gcp:
    """The metadata server of a Compute Engine instance."""

    name = "gcp"
    look_seconds = 1.0

    def __init__(self, server: Server = Server()) -> None:  # noqa: B008
        self._server = server

    def look(self) -> Word:
        """Whether the instance is to be preempted or ended."""
        preempted = read_preempted(self._server.ask(f"{ROOT}preempted", HEADERS))
        maintenance = read_maintenance(self._server.ask(f"{ROOT}maintenance-event", HEADERS))
        return Word(preempted) if preempted is not None else maintenance

    def acknowledge(self) -> None:
        """Nobody asks for it."""


def read_preempted(answer: Answer) -> Notice | None:
    """What ``instance/preempted`` says; BadAnswer if that is neither TRUE nor FALSE."""
    match _value(answer, "instance/preempted"):
        case "FALSE":
            return None
        case "TRUE":
            return Notice("Google Cloud: preempted", PREEMPTION_SECONDS)
        case other:
            raise BadAnswer(f"instance/preempted is {other[:40]!r}")


def read_maintenance(answer: Answer) -> Word:
    """What ``instance/maintenance-event`` says; BadAnswer if that is none of its values."""
    match _value(answer, "instance/maintenance-event"):
        case "NONE":
            return NOTHING
        case "MIGRATE_ON_HOST_MAINTENANCE":
            return Word(hint="Google Cloud: it is migrated alive")
        case "TERMINATE_ON_HOST_MAINTENANCE":
            return Word(Notice("Google Cloud: host maintenance", MAINTENANCE_SECONDS))
        case other:
            raise BadAnswer(f"instance/maintenance-event is {other[:40]!r}")


def _value(answer: Answer, what: str) -> str:
    if answer.status != 200 or answer.headers.get(FLAVOR.lower()) != "Google":
        raise BadAnswer(f"{what} was not answered by Google (status {answer.status})")
    return answer.text()
