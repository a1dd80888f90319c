from megatron_bamboo.membership.lives import first_life, last_life, next_life


def test_each_life_has_a_name_of_its_own() -> None:
    lives = ["node5"]
    for _ in range(10):
        lives.append(next_life(lives[-1]))
    assert lives[:3] == ["node5", "node5.2", "node5.3"] and lives[-1] == "node5.11"
    assert [last_life(life) for life in lives] == [None, *lives[:-1]]
    assert {first_life(life) for life in lives} == {"node5"}


def test_a_name_that_no_life_has_is_a_first_one() -> None:
    for name in ("node5.", "node5.1", "node5.0", "node5.x", "node5.02", "node.5.2", ""):
        assert last_life(name) is None
        assert first_life(name) == name
