"""Look-up of the names that clients request: models, their loaded adapters, and routes in front of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import ReplicaAddress, SchedulerClient
from serve_app.serving.gateway.answer.responses import RequestRejected
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.settings import RouteSettings, ServedModel


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A name that engines serve, resolved to its model or adapter.

    Attributes:
        name: name that the engines know.
        model: the model, or the base model of an adapter.
        adapter: the name if it is an adapter's; otherwise None.
    """

    name: str
    model: ServedModel
    scheduler: SchedulerClient
    adapter: str | None = None

    def replicas(self) -> tuple[ReplicaAddress, ...]:
        """Return the open replicas that serve the name."""
        replicas = self.scheduler.replicas()
        if self.adapter is None:
            return replicas
        holders = self.scheduler.adapters().get(self.adapter, frozenset())
        return tuple(each for each in replicas if each.replica_id in holders)


@dataclass(frozen=True, slots=True)
class FoundName:
    """A requested name.

    Attributes:
        models: the models behind it, those of a route in the order of its settings.
        route: None if the name is that of a model or an adapter.
    """

    name: str
    models: tuple[FoundModel, ...]
    route: RouteSettings | None = None

    def order(self, subject: str) -> tuple[FoundModel, ...]:
        """Return the model for the subject of a request, followed by its fallbacks.

        A model without a replica, such as a new one that starts, has no share, unless a request starts it.
        """
        if self.route is None:
            return self.models
        known = {each.name: each for each in self.models}
        ready = {name for name, each in known.items() if each.model.starts_on_demand or each.replicas()}
        return tuple(known[name] for name in self.route.order(subject, ready))

    def ready(self) -> FoundModel:
        """Return the first model with an open replica, or the first of all if there is none."""
        return next((each for each in self.models if each.replicas()), self.models[0])

    def describe(self) -> dict[str, object]:
        """Return its entry in the list of models."""
        described: dict[str, object] = {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "ewsjf-serve",
        }
        first = self.models[0]
        if self.route is not None:
            described["route"] = {"models": self.route.models, "fallbacks": self.route.fallbacks}
        elif first.adapter is not None:
            described["parent"] = first.model.name
        limits = [each.model.max_model_len for each in self.models]
        if None not in limits:
            described["max_model_len"] = max(limit for limit in limits if limit is not None)
        return described


class ServedModels:
    """Look-up of requested names, including adapters that are loaded now."""

    def __init__(
        self,
        models: tuple[ServedModel, ...],
        schedulers: Mapping[str, SchedulerClient],
        routes: tuple[RouteSettings, ...] = (),
    ) -> None:
        self._models = {
            model.name: FoundName(model.name, (FoundModel(model.name, model, schedulers[model.name]),))
            for model in models
        }
        self._routes: dict[str, FoundName] = {}
        self.change(routes)

    def __repr__(self) -> str:
        return f"<ServedModels {', '.join(each.name for each in self._all())}>"

    def change(self, routes: tuple[RouteSettings, ...]) -> None:
        """Use other routes for requests that are read from now on."""
        self._routes = {
            route.name: FoundName(
                route.name, tuple(self._models[name].models[0] for name in route.members), route
            )
            for route in routes
        }

    def find(self, name: str, caller: Caller) -> FoundName:
        """Return what a name stands for.

        Raises:
            RequestRejected: it is not served, or not to this caller; the message lists the allowed ones.
        """
        found = self._routes.get(name) or self._models.get(name)
        if found is None:
            found = next((each for each in self._adapters() if each.name == name), None)
        if found is None:
            served = ", ".join(sorted(each.name for each in self.usable(caller))) or "none for this key"
            raise RequestRejected(
                Outcome.REJECTED_UNKNOWN_MODEL,
                f"unknown model {name[:100]!r}; models: {served}",
                param="model",
            )
        caller.check_model(name)
        return found

    def usable(self, caller: Caller) -> list[FoundName]:
        """Return the names that a caller may use: routes, then models, then adapters."""
        return [found for found in self._all() if caller.may_use(found.name)]

    def first(self, caller: Caller) -> str:
        """Return the first name that a caller may use, or the first of all if there is none."""
        usable = self.usable(caller)
        return usable[0].name if usable else next(iter(self._models))

    def _all(self) -> Iterator[FoundName]:
        yield from self._routes.values()
        yield from (found for name, found in self._models.items() if name not in self._routes)
        yield from self._adapters()

    def _adapters(self) -> Iterator[FoundName]:
        seen = {*self._models, *self._routes}
        for name in self._models.values():
            base = name.models[0]
            for adapter in sorted(base.scheduler.adapters()):
                if adapter not in seen:
                    seen.add(adapter)
                    yield FoundName(adapter, (FoundModel(adapter, base.model, base.scheduler, adapter),))
