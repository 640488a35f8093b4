"""The losses of one sequence: whether it is a suspect, and what follows from the next loss."""

from __future__ import annotations

from services.core.generation import SequenceEnd
from services.core.poison.suspicion import Condemned, LossCause, LostTooOften, StepRole, Suspicion, judge
from services.gateway.policy.retry import GiveUp, OutsideKills, PlaceAgain, after_loss


class Losses:
    """Written by the sequence's task. ``kills`` is shared by all sequences of the gateway."""

    def __init__(self, kills: OutsideKills) -> None:
        self._kills = kills
        self._suspicion = Suspicion()
        self._suspect_since_s: float | None = None  # the start of its first run apart

    @property
    def trial_tokens(self) -> int:
        """How many tokens the next run produces apart; 0: the sequence is no suspect."""
        return self._suspicion.trial_tokens

    def starts(self, now_s: float) -> None:
        """The sequence runs again."""
        if self.trial_tokens and self._suspect_since_s is None:
            self._suspect_since_s = now_s

    def after(
        self, end: SequenceEnd | None, worker_id: str, losses: int, now_s: float, jitter: float
    ) -> PlaceAgain | GiveUp | Condemned:
        """Judge the sequence after loss number ``losses``. ``end`` None: its worker was lost too."""
        cause, role = LossCause.OUTSIDE, StepRole.NONE
        if end is not None:
            cause, role = end.loss_cause, end.step_role
            self._kills.note(cause, role, now_s)
        since_s = self._suspect_since_s
        others_killed = since_s is not None and self._kills.any_since(since_s)
        verdict = judge(self._suspicion, cause, role, others_killed=others_killed)
        if isinstance(verdict, Condemned):
            return verdict
        if isinstance(verdict, LostTooOften):
            return GiveUp(f"the worker was lost under this request {verdict.losses} times")
        self._suspicion = verdict.suspicion
        if others_killed:
            self._suspect_since_s = None  # its next run apart is its first evidence
        return after_loss(worker_id, losses, jitter, cause, role)
