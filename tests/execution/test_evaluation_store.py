"""Facts of evaluations in a real store."""

import json
from dataclasses import asdict, replace

import pytest

from megatron_bamboo.evaluation.due import Evaluation, Kind
from megatron_bamboo.evaluation.outcome import Evaluated
from megatron_bamboo.execution.errors import DeadlineExceeded, EpochEnded
from megatron_bamboo.execution.evaluation_store import (
    EvaluationStore,
    Share,
    batch_key,
    begin_key,
    outcome_key,
)
from megatron_bamboo.membership.restores import RESTORES_KEY, Restores
from megatron_bamboo.membership.store_client import StoreClient

EVALUATION = Evaluation(10, Kind.INTERVAL, 0, 2)
SHARES = (Share((2, 1), 0), Share((2, 1), 1))
OUTCOME = Evaluated(10, Kind.INTERVAL, 1, 0.5, {"lm loss": (1.5).hex()})


@pytest.fixture
def store(client: StoreClient) -> EvaluationStore:
    return EvaluationStore(client)


def report(store: EvaluationStore, share: Share, batch: int) -> None:
    store.report(EVALUATION, share, batch, {share.pipeline: {"lm loss": (float(batch), 1.0)}})


def test_a_pipeline_begins_where_it_has_not_reported(store: EvaluationStore) -> None:
    for epoch, reported in enumerate((0, 1, 2)):
        store.tell_begin(EVALUATION, epoch, SHARES[0])
        assert store.first_batch(EVALUATION, epoch, SHARES[0]) == reported
        report(store, SHARES[0], reported)
    # With other shares of the batch, in another evaluation or another pipeline nothing is reported.
    others = [
        (EVALUATION, Share((3, 0), 0)),
        (EVALUATION, SHARES[1]),
        (EVALUATION, replace(SHARES[0], num_restores=1)),
        (replace(EVALUATION, kind=Kind.TEST), SHARES[0]),
        (replace(EVALUATION, step=1), SHARES[0]),
    ]
    for evaluation, share in others:
        store.tell_begin(evaluation, 3, share)
        assert store.first_batch(evaluation, 3, share) == 0


def test_where_what_was_told_is_undone_the_epoch_is_over(
    store: EvaluationStore, client: StoreClient
) -> None:
    """All go back to a checkpoint, and a worker has not heard of it yet."""
    store.tell_begin(EVALUATION, 0, SHARES[0])
    client.delete_prefix("evaluation/")
    with pytest.raises(EpochEnded):
        store.first_batch(EVALUATION, 0, SHARES[0])


def test_how_often_all_went_back_is_in_the_store(
    store: EvaluationStore, client: StoreClient
) -> None:
    assert store.num_restores() == 0
    client.set(RESTORES_KEY, json.dumps(asdict(Restores(2, 5, 3, 7))).encode())
    assert store.num_restores() == 2


def test_what_all_have_reported_comes_together(store: EvaluationStore) -> None:
    for share in SHARES:
        report(store, share, 1)
    expected = {0: {"lm loss": (1.0, 1.0)}, 1: {"lm loss": (1.0, 1.0)}}
    assert store.reports(EVALUATION, SHARES, 1) == expected


def test_the_first_outcome_holds(store: EvaluationStore) -> None:
    assert store.outcome(EVALUATION) is None
    store.tell_outcome(EVALUATION, OUTCOME)
    store.tell_outcome(EVALUATION, replace(OUTCOME, epoch=2))
    assert store.outcome(EVALUATION) == OUTCOME


def test_batches_are_forgotten_and_the_outcome_is_not(
    store: EvaluationStore, client: StoreClient
) -> None:
    report(store, SHARES[0], 0)
    store.tell_begin(EVALUATION, 0, SHARES[0])
    store.tell_outcome(EVALUATION, OUTCOME)
    other = replace(EVALUATION, step=100)
    store.report(other, SHARES[0], 0, {})
    store.forget(10)
    for key in (batch_key(EVALUATION, SHARES[0], 0), begin_key(EVALUATION, 0, SHARES[0])):
        assert client.get(key) is None
    assert client.get(outcome_key(EVALUATION)) and client.get(batch_key(other, SHARES[0], 0))


def test_a_wait_ends_with_the_epoch_and_at_its_deadline(store: EvaluationStore) -> None:
    key = batch_key(EVALUATION, SHARES[0], 0)
    with pytest.raises(EpochEnded):
        store.await_key(key, 60.0, lambda: True, "it")
    with pytest.raises(DeadlineExceeded, match=r"batch 0, from node3, was not there in 0 s"):
        store.await_key(key, 0.0, lambda: False, "batch 0, from node3,")
    report(store, SHARES[0], 0)
    store.await_key(key, 0.0, lambda: True, "it")
