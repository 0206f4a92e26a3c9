"""What happened in one game, and what it is worth to each player."""

from __future__ import annotations

from dataclasses import dataclass, field

from prime_rl_environment_duel.rules import best_move, read_move

PLAYERS = ("first", "second")


@dataclass
class Game:
    """A game under way. Players move in turn; a move against the rules loses at once."""

    stones: int
    moves: list[int] = field(default_factory=list)
    winner: str | None = None
    broke_rules: str | None = None
    """The player who made a move that is none."""
    chances: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PLAYERS, 0))
    """How often a player was to move and could have won for certain."""
    taken: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PLAYERS, 0))
    """How often the player then made the move that does."""
    replies: int = 0

    @property
    def player(self) -> str:
        """Whose turn it is."""
        return PLAYERS[self.replies % 2]

    @property
    def is_over(self) -> bool:
        """Somebody has won."""
        return self.winner is not None

    def play(self, reply: str) -> None:
        """The player whose turn it is answers with `reply`."""
        player, other = self.player, PLAYERS[(self.replies + 1) % 2]
        best, move = best_move(self.stones), read_move(reply, self.stones)
        self.replies += 1
        if best is not None:
            self.chances[player] += 1
            self.taken[player] += move == best
        if move is None:
            self.broke_rules, self.winner = player, other
            return
        self.moves.append(move)
        self.stones -= move
        if self.stones == 0:
            self.winner = player

    def reward(self, player: str) -> float:
        """1 for the winner, 0 for the other. Raises ValueError while the game is under way."""
        if self.winner is None:
            raise ValueError(f"the game is not over: {self.stones} stones are left")
        return float(self.winner == player)
