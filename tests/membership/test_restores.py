"""What is forgotten when all go back to a checkpoint, and what is kept."""

from megatron_bamboo.membership.restores import Restores
from megatron_bamboo.membership.table import Table


def test_what_is_known_of_undone_steps_is_forgotten_and_nothing_else() -> None:
    table = Table()
    kept = ("passed/4", "passed/5", "saved/5", "said/saved/5", "said/late/node7", "passed_on/9")
    for key in (*kept, "passed/6", "passed/10", "saved/10", "said/saved/10", "said/differences/6"):
        table.set(key, b"1")
    assert Restores.of(table) == Restores()
    Restores(1, 3, 5, 11).write(table)
    assert Restores.of(table) == Restores(1, 3, 5, 11)
    assert {key for key in table.items("") if key != "restores"} == set(kept)


def test_what_was_done_before_in_a_later_step_counts_no_more() -> None:
    restores = Restores(number=2, epoch=7, step=5, furthest=9)
    assert restores.undoes(6, 6)
    assert not restores.undoes(5, 6)
    assert not restores.undoes(6, 7)
    assert not Restores().undoes(1, 0)
