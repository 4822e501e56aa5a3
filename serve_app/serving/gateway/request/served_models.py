"""The names that clients may ask for: models that are configured, and LoRA adapters that engines list.

An adapter comes and goes with the lists of the engines, without a restart. It belongs to the model whose
engines list it, and its requests to that model's scheduler. A name that is configured is no adapter's, and of
two models that list the same adapter the first has it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from serve_app.errors import Outcome
from serve_app.serving.channel.scheduler_client import ReplicaAddress, SchedulerClient
from serve_app.serving.gateway.answer.responses import RequestRefused
from serve_app.serving.gateway.keys import Caller
from serve_app.serving.gateway.settings import ServedModel


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A served name, and its model or adapter.

    Attributes:
        name: as clients write it.
        model: the model itself, or the one that the adapter belongs to.
        adapter: the same name where it is an adapter's; else None.
    """

    name: str
    model: ServedModel
    scheduler: SchedulerClient
    adapter: str | None = None

    def replicas(self) -> tuple[ReplicaAddress, ...]:
        """The open replicas that serve it."""
        replicas = self.scheduler.replicas()
        if self.adapter is None:
            return replicas
        holders = self.scheduler.adapters().get(self.adapter, frozenset())
        return tuple(each for each in replicas if each.replica_id in holders)

    def described(self) -> dict[str, object]:
        """Its entry in the list of models."""
        described: dict[str, object] = {
            "id": self.name,
            "object": "model",
            "created": 0,
            "owned_by": "ewsjf-serve",
        }
        if self.adapter is not None:
            described["parent"] = self.model.name
        if self.model.max_model_len is not None:
            described["max_model_len"] = self.model.max_model_len
        return described


class ServedModels:
    """All names as they stand now.

    Args:
        models: those that are configured.
        schedulers: of each, by name.
    """

    def __init__(self, models: tuple[ServedModel, ...], schedulers: Mapping[str, SchedulerClient]) -> None:
        self._models = {model.name: FoundModel(model.name, model, schedulers[model.name]) for model in models}

    def __repr__(self) -> str:
        return f"<ServedModels {', '.join(each.name for each in self._all())}>"

    def find(self, name: str, caller: Caller) -> FoundModel:
        """Return the model or adapter of a name.

        Raises:
            RequestRefused: it is not served, or not to this caller; says which ones are, of those that the
                caller may use.
        """
        found = self._models.get(name) or next((each for each in self._adapters() if each.name == name), None)
        if found is None:
            served = ", ".join(sorted(each.name for each in self.usable(caller)))
            raise RequestRefused(
                Outcome.REJECTED_UNKNOWN_MODEL,
                f"the model {name[:100]!r} is not served here; models: {served}",
                param="model",
            )
        caller.check_model(name)
        return found

    def usable(self, caller: Caller) -> list[FoundModel]:
        """Return the models that a caller may use, adapters last."""
        return [found for found in self._all() if caller.may_use(found.name)]

    def first(self, caller: Caller) -> str:
        """The first name that a caller may use; the very first where there is none."""
        usable = self.usable(caller)
        return usable[0].name if usable else next(iter(self._models))

    def _all(self) -> Iterator[FoundModel]:
        yield from self._models.values()
        yield from self._adapters()

    def _adapters(self) -> Iterator[FoundModel]:
        seen = set(self._models)
        for found in self._models.values():
            for adapter in sorted(found.scheduler.adapters()):
                if adapter not in seen:
                    seen.add(adapter)
                    yield FoundModel(adapter, found.model, found.scheduler, adapter)
