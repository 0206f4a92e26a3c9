"""Rules, games, rewards and fine-tuning rows, with values worked out by hand."""

from __future__ import annotations

import functools
import subprocess
import sys

import pytest
from prime_rl_environment_duel import sft_rows
from prime_rl_environment_duel.game import Game
from prime_rl_environment_duel.rules import best_move, perfect_move, random_move, read_move


@pytest.mark.parametrize(
    ("reply", "stones", "move"),
    [
        ("1", 1, 1),
        ("3", 3, 3),
        ("3", 2, None),  # more than there are
        ("0", 5, None),
        ("4", 9, None),
        ("12", 15, None),
        ("", 5, None),
        ("a", 5, None),
        ("1 ", 5, None),
        ("²", 5, None),
    ],
)
def test_a_move_is_one_digit_of_at_most_three(reply, stones, move) -> None:
    assert read_move(reply, stones) == move


@functools.cache
def wins(stones: int) -> bool:
    """The player to move can win: found by trying everything."""
    return any(not wins(stones - move) for move in (1, 2, 3) if move <= stones)


@pytest.mark.parametrize("stones", range(1, 25))
def test_the_best_move_leaves_the_other_a_lost_pile(stones) -> None:
    winning = [move for move in (1, 2, 3) if move <= stones and not wins(stones - move)]
    assert winning == ([] if best_move(stones) is None else [best_move(stones)])
    assert perfect_move(stones) == (winning or [1])[0]


def test_random_moves_are_legal_repeatable_and_spread() -> None:
    moves = [random_move(9, f"game {number}") for number in range(600)]
    assert moves == [random_move(9, f"game {number}") for number in range(600)]
    assert all(160 < moves.count(move) < 240 for move in (1, 2, 3))
    assert {random_move(2, str(number)) for number in range(50)} == {1, 2}
    assert {random_move(1, str(number)) for number in range(50)} == {1}


def played(stones: int, *replies: str) -> Game:
    game = Game(stones)
    for reply in replies:
        assert not game.is_over
        game.play(reply)
    return game


def test_who_takes_the_last_stone_wins() -> None:
    game = played(6, "2", "1", "3")  # 6 -> 4 -> 3 -> 0
    assert game.winner == "first" and game.broke_rules is None and game.moves == [2, 1, 3]
    assert (game.reward("first"), game.reward("second")) == (1.0, 0.0)
    assert game.chances == {"first": 2, "second": 0}  # four stones are lost
    assert game.taken == {"first": 2, "second": 0}


def test_a_missed_chance_is_counted_and_used_by_the_other() -> None:
    game = played(6, "1", "1", "1", "3")  # 6 -> 5 -> 4 -> 3 -> 0
    assert game.winner == "second"
    assert game.chances == {"first": 1, "second": 2}
    assert game.taken == {"first": 0, "second": 2}


def test_a_reply_against_the_rules_loses_at_once() -> None:
    game = played(5, "1", "tool")
    assert game.winner == "first" and game.broke_rules == "second"
    assert game.chances["second"] == 0 and game.stones == 4 and game.moves == [1]
    assert played(2, "3").winner == "second"


def test_a_game_under_way_is_worth_nothing_yet() -> None:
    with pytest.raises(ValueError, match="4 stones are left"):
        played(5, "1").reward("first")


def test_rows_are_one_side_of_legal_games() -> None:
    rows = sft_rows(300, seed=4)
    assert rows == sft_rows(300, seed=4) != sft_rows(300, seed=5)
    opening = set()
    for row in rows:
        messages = row["messages"]
        assert [m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2)
        piles = [int(m["content"]) for m in messages[::2]]
        moves = [read_move(m["content"], p) for m, p in zip(messages[1::2], piles, strict=True)]
        assert None not in moves
        for pile, move, later in zip(piles, moves, piles[1:], strict=False):
            assert 1 <= pile - move - later <= 3
        opening.add(piles[0])
    assert opening == set(range(1, 16))
    with pytest.raises(ValueError, match="min_stones=0"):
        sft_rows(1, min_stones=0)


def test_tasks_are_the_piles() -> None:
    from prime_rl_environment_duel import DuelTaskset
    from prime_rl_environment_duel.taskset import DuelConfig

    def piles(**config: object) -> list[int]:
        return [task.data.stones for task in DuelTaskset(DuelConfig.model_validate(config))]

    assert piles(max_stones=5) == [1, 2, 3, 4, 5]
    assert piles(min_stones=3, max_stones=9, only_won=True) == [3, 5, 6, 7, 9]
    with pytest.raises(ValueError, match="min_stones=7 is above max_stones=6"):
        DuelConfig(min_stones=7, max_stones=6)


def test_importing_the_package_and_its_rows_loads_nothing_heavy() -> None:
    program = (
        "import sys, prime_rl_environment_duel as package; package.sft_rows(3);"
        "print([name for name in ('torch', 'numpy', 'triton', 'verifiers', 'transformers')"
        " if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
