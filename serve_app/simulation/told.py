"""Clients that ask where they stand in the queue, simulated: what they are told, and how honest that is.

The live scheduler tells by the same object (`scheduling.outlook`), at the same intervals.
"""

from collections.abc import Callable
from functools import partial

from serve_app.request import Request
from serve_app.scheduling.commands import Conclude, Dispatch
from serve_app.scheduling.decision_log import Decision
from serve_app.scheduling.events import Arrived
from serve_app.scheduling.outlook.watched import Honesty, Outlook, WatchedRequests
from serve_app.simulation.run import RunSettings, prepared
from serve_app.simulation.simulation import Simulation
from serve_app.simulation.timeline import Rank

# As in the gateway and in the live scheduler.
ASKS_AFTER_S = LOOKS_EVERY_S = 0.25


class ToldClients:
    """The clients of one simulation.

    Args:
        asks: whether the client of a request does; by default all do.
        on_told: called with what one is told, and when.

    Attributes:
        honesty: of what was told, for each request that started.
    """

    def __init__(
        self,
        simulation: Simulation,
        asks: Callable[[Request], bool] = lambda _: True,
        on_told: Callable[[Outlook, float], None] = lambda _outlook, _now: None,
    ) -> None:
        self._simulation = simulation
        self._asks, self._on_told = asks, on_told
        self._watched = WatchedRequests(simulation.scheduler)
        self._looks = False
        self.honesty: list[Honesty] = []
        simulation.on_decision = self._on_decision

    def __repr__(self) -> str:
        return f"<ToldClients {self._watched}>"

    def _on_decision(self, decision: Decision) -> None:
        if isinstance(decision.event, Arrived) and self._asks(decision.event.request):
            request_id = decision.event.request.request_id
            self._simulation.timeline.at(
                decision.now + ASKS_AFTER_S, Rank.REPORT, partial(self._ask, request_id)
            )
        for command in decision.commands:
            if isinstance(command, Dispatch):
                scheduled = self._simulation.scheduler.find(command.request_id)
                assert scheduled is not None
                self.honesty += self._watched.on_dispatch(scheduled, decision.now)
            elif isinstance(command, Conclude):
                outcome = command.conclusion.outcome
                self.honesty += self._watched.on_conclusion(command.request_id, outcome, decision.now)

    def _ask(self, request_id: str) -> None:
        now = self._simulation.timeline.now
        if self._watched.watch(request_id, now) and not self._looks:
            self._looks = True
            self._look()

    def _look(self) -> None:
        timeline = self._simulation.timeline
        for told in self._watched.look(timeline.now):
            for outlook in told:
                self._on_told(outlook, timeline.now)
        self._looks = bool(self._watched)
        if self._looks:
            timeline.at(timeline.now + LOOKS_EVERY_S, Rank.REPORT, self._look)


def simulate_told(settings: RunSettings) -> list[Honesty]:
    """Play one run in which every client asks, and return how honest it was to those that waited.

    Raises:
        TraceError: there is no such trace, or nothing in it fits the engines.
        SettingsError: a setting is unknown or out of range.
    """
    simulation, requests = prepared(settings)
    clients = ToldClients(simulation)
    simulation.run(requests)
    return clients.honesty
