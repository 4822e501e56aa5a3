"""The values in force in a production that carries out the commands of a roll-out."""

import math

from serve_app.tuning.online.rollout import Rollout
from serve_app.tuning.online.rollout_settings import Apply
from serve_app.tuning.search.search_space import Values


class Production:
    """Values in force; those on trial expire, as they do in a scheduler."""

    def __init__(self, rollout: Rollout) -> None:
        self.rollout = rollout
        self.permanent: Values = rollout.incumbent
        self.values: Values = self.permanent
        self.expires_at = math.inf
        self.applied: list[Values] = []

    def carry_out(self, commands: list[Apply], now: float) -> None:
        for command in commands:
            self.values, self.expires_at = command.values, math.inf
            self.applied.append(command.values)
            if command.valid_s is None:
                self.permanent = self.values
            else:
                self.expires_at = now + command.valid_s

    def expire(self, now: float) -> None:
        if now >= self.expires_at:
            self.values, self.expires_at = self.permanent, math.inf
