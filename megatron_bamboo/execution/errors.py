"""What can go wrong between workers."""


class PeerLost(Exception):
    """A wait for another worker failed: it died, or its connection broke.

    A sign, not a proof: who is lost is the coordinator's to say, in a plan. Caught in one place,
    the executor's loop, which then waits for that plan.
    """

    def __init__(self, peers: tuple[str, ...], what: str, cause: BaseException | None) -> None:
        self.peers = peers
        self.what = what
        reason = f": {str(cause).splitlines()[0]}" if cause is not None and str(cause) else ""
        super().__init__(f"{what} with {', '.join(peers)} failed{reason}")


class EpochEnded(Exception):
    """The plan that this worker acts by is no longer in force; a new one comes."""


class LetGo(Exception):
    """This worker's node is in no place any more: others have taken over all that it held."""


class DeadlineExceeded(Exception):
    """A wait reached its deadline and nobody said that the peer is lost."""


class TrainingError(Exception):
    """The training itself cannot go on: every worker finds the same, and the job ends."""
