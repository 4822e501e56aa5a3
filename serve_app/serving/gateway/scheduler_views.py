"""Questions of admins about the schedulers, which a gateway passes on over the control channel."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Protocol

from serve_app.errors import Outcome
from serve_app.serving.gateway.answer.responses import RequestRefused

# A person is waiting, and a scheduler that takes longer has other troubles.
VIEW_TIMEOUT_S = 5.0


class SchedulerViews(Protocol):
    """One model's scheduler, as admins see it."""

    async def ask(self, question: str, **arguments: Any) -> Any:
        """Return the answer to a question of `scheduler.questions.AdminQuestions`.

        Raises:
            ChannelError: the scheduler is away, or cannot answer.
        """
        ...


async def ask(
    model: str, views: SchedulerViews, question: str, within_s: float = VIEW_TIMEOUT_S, **arguments: Any
) -> Any:
    """Ask the scheduler of one model.

    Raises:
        RequestRefused: it does not answer.
    """
    try:
        return await asyncio.wait_for(views.ask(question, **arguments), within_s)
    except Exception as error:
        message = f"the scheduler of {model} does not answer: {error!r}; try again"
        raise RequestRefused(Outcome.REJECTED_NO_REPLICA, message, retry_after_s=1.0) from error


Question = Callable[[str, SchedulerViews], Awaitable[Mapping[str, Any]]]
"""A question to a model's scheduler, given the model's name."""


async def ask_each(
    views: Mapping[str, SchedulerViews],
    question: Question,
) -> list[Mapping[str, Any]]:
    """Ask every model's scheduler; for one that does not answer, its model and why."""
    answers: list[Mapping[str, Any]] = []
    for model, each in views.items():
        try:
            answers.append(await asyncio.wait_for(question(model, each), VIEW_TIMEOUT_S))
        except Exception as error:  # noqa: BLE001 - whatever keeps one scheduler from answering
            answers.append({"model": model, "error": f"its scheduler does not answer: {error!r}"})
    return answers
