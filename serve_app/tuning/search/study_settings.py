"""How long is searched for better settings, and what does it take to win?"""

from dataclasses import dataclass
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True, kw_only=True)
class StudySettings:
    """Sizes of a study (`study.Study`)."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    # Candidates, the one in force among them.
    trials: int = 60
    # Windows after which poor candidates stop. The last number is how many windows all are compared on.
    rungs: tuple[int, ...] = (1, 2, 4, 8)
    # Share of candidates that go on at a rung. Lower searches wider; higher trusts a single window less.
    keep_ratio: float = 0.4
    # Candidates to a round: at least as many as processes, or some idle.
    batch: int = 4
    # Fresh windows on which a candidate has to win.
    confirm_windows: int = 12
    # Candidates that get the chance. Each has one in forty to win without being better.
    finalists: int = 2

    def __post_init__(self) -> None:
        for name in ("trials", "batch", "finalists"):
            if getattr(self, name) < 1:
                raise ValueError(f"study.{name} must be at least 1, got {getattr(self, name)}")
        if self.confirm_windows < 2:
            raise ValueError(
                f"study.confirm_windows must be at least 2, or nobody can win, got {self.confirm_windows}"
            )
        ordered = list(self.rungs) == sorted(set(self.rungs))
        if not self.rungs or self.rungs[0] < 1 or not ordered:
            raise ValueError(f"study.rungs must be numbers of windows in ascending order, got {self.rungs}")
        if not 0 < self.keep_ratio <= 1:
            raise ValueError(f"study.keep_ratio must be above 0 and at most 1, got {self.keep_ratio}")
