"""Request reader: checks bodies, builds submissions, and resolves model names and programs.

`program_hint` reads the ids by which clients state the conversation and the agents of a request. Clients do
not agree on a field, so the first usable id of the following list is the session:

1. `SESSION_HEADERS`, in their order.
2. In the body: `session_id`, `prompt_cache_key`, `metadata["gen_ai.conversation.id"]` and `conversation` of
   OpenAI's APIs, or the session in `metadata.user_id` of the Messages API. Clients of Dynamo send
   `nvext.session_control.session_id`, or `nvext.agent_context` with the ids of an agent's trajectory, of its
   run and of the trajectory that launched it.
3. `x-correlation-id`, which load generators keep for a conversation, but other clients renew.
4. The chain of `previous_response_id`, see `answer.stored`.
5. `x-program-id`.

An id has 1 to 256 printable characters. Others are ignored, because a hint must not fail a request.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from serve_app.errors import Outcome
from serve_app.request import PriorityClass, ProgramHint, RequestSpec, Submission, completed
from serve_app.serving.gateway.answer.assembly import CONTINUABLE_FIELDS
from serve_app.serving.gateway.answer.responses import RequestRejected, header_text
from serve_app.serving.gateway.answer.stored import ResponseHolders, StoredResponse
from serve_app.serving.gateway.keys import Budgets, Caller, Keyring
from serve_app.serving.gateway.models import FoundModel, FoundName, ServedModels
from serve_app.serving.gateway.path import AnswerForm, Fallbacks, Request, with_limit
from serve_app.serving.gateway.request import fields as heads
from serve_app.serving.gateway.request.body import (
    AS_STREAM,
    NO_BODY,
    NO_PRIORITY,
    BodyBudget,
    HeldBody,
    append_fields,
    check_structure,
    is_plain,
    priority_field,
    salt_field,
    usage_field,
)
from serve_app.serving.gateway.request.endpoints import ParsedBody
from serve_app.serving.gateway.request.fields import (
    ABSENT,
    CLASS_OBJECTIVES,
    BodyFields,
    GenerationFields,
    MessagesFields,
    ObjectiveSettings,
    ResponsesFields,
    UsageOnRequestFields,
    with_own_names,
)
from serve_app.serving.gateway.request.measure import Prompt, engine_salt
from serve_app.serving.gateway.settings import GatewaySettings
from serve_app.serving.gateway.tracing.request_trace import RequestTracer

SESSION_HEADERS = (
    b"x-session-id",
    # opencode sends both.
    b"x-session-affinity",
    b"x-dynamo-session-id",
    b"x-claude-code-session-id",
    b"x-litellm-session-id",
    # Codex: the thread is one agent, the session may have several.
    b"thread-id",
    b"session-id",
)
PARENT_HEADERS = (b"x-parent-session-id", b"x-dynamo-parent-session-id", b"x-codex-parent-thread-id")
PROGRAM_HEADERS = (b"x-program-id",)
CORRELATION_HEADERS = (b"x-correlation-id",)
_HEADERS = frozenset((*SESSION_HEADERS, *PARENT_HEADERS, *PROGRAM_HEADERS, *CORRELATION_HEADERS))

_MAX_CHARACTERS = 256
# `user_<hash>_account_<uuid>_session_<uuid>`; newer versions of Claude Code write an object as text.
_USER_OF_CLAUDE_CODE = re.compile(r"user_.*_session_(.+)")


def program_hint(headers: Mapping[bytes, bytes], body: BodyFields) -> ProgramHint | None:
    """Return the program that a request states; None if it states none."""
    session = program = parent = correlation = ""
    if not _HEADERS.isdisjoint(headers):
        session, program = session_of(headers), _header_id(headers, PROGRAM_HEADERS)
        parent = _header_id(headers, PARENT_HEADERS)
        correlation = _header_id(headers, CORRELATION_HEADERS)
    session = session or _session_of_body(body)
    if isinstance(body, GenerationFields) and body.nvext is not ABSENT:
        of_dynamo = _dynamo_ids(body.nvext)
        session, program, parent = session or of_dynamo[0], program or of_dynamo[1], parent or of_dynamo[2]
    session = session or correlation or program
    return ProgramHint(session=session, program=program or None, parent=parent or None) if session else None


def session_of(headers: Mapping[bytes, bytes]) -> str:
    """Return the session that the headers of a request state; empty for none."""
    return _header_id(headers, SESSION_HEADERS)


def _session_of_body(body: BodyFields) -> str:
    if isinstance(body, MessagesFields):
        return _session_of_user(body.end_user or "")
    if not isinstance(body, GenerationFields):
        return ""
    stated = body.conversation if isinstance(body, ResponsesFields) else ABSENT
    if body.session_id is body.prompt_cache_key is body.metadata is stated is ABSENT:
        return ""
    conversation = _value(stated)
    return _first_id(
        (
            _value(body.session_id),
            _value(body.prompt_cache_key),
            _member(_value(body.metadata), "gen_ai.conversation.id"),
            conversation,
            _member(conversation, "id"),
        )
    )


def _dynamo_ids(nvext: msgspec.Raw) -> tuple[str, str, str]:
    """Return session, program and parent in the extension fields of Dynamo's clients; each may be empty.

    A trajectory is one conversation of an agent; the session of its context is the agent's whole run.
    """
    extensions = _value(nvext)
    agent, control = _member(extensions, "agent_context"), _member(extensions, "session_control")
    run, trajectory = _member(agent, "session_id"), _member(agent, "trajectory_id")
    session = _first_id((trajectory, _member(control, "session_id"), run))
    return session, _first_id([run]), _first_id([_member(agent, "parent_trajectory_id")])


def _session_of_user(user_id: str) -> str:
    """Return the session inside a user id of Claude Code; empty for an id that names only a user."""
    if user_id.startswith("{"):
        return _first_id([_member(_value(user_id), "session_id")])
    named = _USER_OF_CLAUDE_CODE.fullmatch(user_id)
    return _first_id([named[1]]) if named is not None else ""


def _value(field: msgspec.Raw | str) -> Any:
    """Decode a field of any type; None if it is absent or not JSON."""
    if field is ABSENT:
        return None
    try:
        return msgspec.json.decode(field)
    except (ValueError, RecursionError):
        return None


def _member(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None


def _header_id(headers: Mapping[bytes, bytes], names: Iterable[bytes]) -> str:
    return _first_id(header_text(headers[name]) for name in names if name in headers)


def _first_id(candidates: Iterable[Any]) -> str:
    """Return the first usable id; empty if there is none."""
    return next((each for each in candidates if _is_usable(each)), "")


def _is_usable(found: Any) -> bool:
    return isinstance(found, str) and 0 < len(found) <= _MAX_CHARACTERS and found.isprintable()


T = TypeVar("T")

# Longer bodies are checked and parsed on a thread. For shorter ones, changing threads costs more than the
# 5 ms at most for which they block the event loop.
_LARGE_BODY_BYTES = 256 * 1024
# The limit for bodies that mostly consist of long texts; these also cost more memory on a thread.
_LARGE_TEXT_BYTES = 512 * 1024
# The parts of a form around its file.
FORM_BYTES = 64 * 1024
# Pieces of this length are stored as they arrive; shorter ones are joined.
_OWN_PIECE_BYTES = 4 * 1024


class RequestReader:
    """Reader and validator of requests, before a scheduler sees them.

    Attributes:
        objectives: all objectives that requests can name, by name in lower case.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        models: ServedModels,
        budgets: Budgets | None = None,
        tracer: RequestTracer | None = None,
        on_ignored_header: Callable[[bytes, str], None] = lambda _name, _objective: None,
        holders: ResponseHolders | None = None,
    ) -> None:
        self._settings = settings
        self._models = models
        self._keyring = _keyring_of(settings)
        self._budgets = budgets or Budgets({}, {})
        self._tracer = tracer
        self._on_ignored_header = on_ignored_header
        self._discovered: dict[str, Mapping[str, ObjectiveSettings]] = {}
        self.objectives = self._all_objectives()
        self._holders = holders or ResponseHolders()
        self.bodies = BodyBudget(settings.max_held_body_bytes)
        # One thread: the GIL makes more no faster, and the event loop is not blocked.
        self._large_bodies = ThreadPoolExecutor(1, "large-bodies")

    def change(self, settings: GatewaySettings) -> None:
        """Apply other settings of the same models to requests that arrive from now on.

        Raises:
            SettingsError: a key cannot be read; the previous settings stay in effect.
        """
        keyring, before = _keyring_of(settings, self._keyring), self._keyring
        self._settings, self._keyring = settings, keyring
        self.objectives = self._all_objectives()
        self.bodies.max_bytes = settings.max_held_body_bytes
        before.close()

    def show_objectives(self, source: str, priorities: Mapping[str, int]) -> None:
        """Replace the `InferenceObjective`s of a source: priorities by name."""
        self._discovered[source] = {
            name: ObjectiveSettings.with_number(priority) for name, priority in priorities.items()
        }
        self.objectives = self._all_objectives()

    def _all_objectives(self) -> dict[str, ObjectiveSettings]:
        found = dict(CLASS_OBJECTIVES)
        for source in sorted(self._discovered):
            found |= self._discovered[source]
        return found | {name.lower(): each for name, each in self._settings.objectives.items()}

    @property
    def max_body_bytes(self) -> int:
        """Maximum length of a body, which may change."""
        return self._settings.max_body_bytes

    def authenticate(self, request: Request) -> Caller:
        """Return the caller of a request, which is found once.

        Raises:
            RequestRejected: the key is missing or not valid.
        """
        if request.caller is None:
            within = request.exchange.caller
            request.caller = within if isinstance(within, Caller) else self.caller(request.headers)
            request.headers = with_own_names(
                request.headers, request.caller, self.objectives, self._on_ignored_header
            )
        return request.caller

    def caller(self, headers: Mapping[bytes, bytes]) -> Caller:
        """Return the caller that the headers of a request identify.

        Raises:
            RequestRejected: the key is missing or not valid.
        """
        return self._keyring.caller(headers.get(b"authorization"), headers.get(b"x-api-key"))

    def caller_with(self, key_id: str) -> Caller:
        """Return the caller with a key, for a request from within; an empty id is of a caller without key.

        Raises:
            RequestRejected: there is no such key, or it is no longer valid.
        """
        return self._keyring.caller_with(key_id)

    async def pieces(self, request: Request, max_bytes: int, piece_bytes: int) -> AsyncIterator[bytes]:
        """Yield a body that is too long for the memory, in pieces of about `piece_bytes`.

        Raises:
            RequestRejected: it is too long, too slow or compressed.
            ClientGone: the client disconnected before it was complete.
        """
        settings, loop = self._settings, asyncio.get_running_loop()
        heads.reject_encoded_body(request.headers.get(b"content-encoding"))
        stated = request.headers.get(b"content-length", b"0")
        if stated.isdigit() and int(stated) > max_bytes + FORM_BYTES:
            raise _file_too_large(max_bytes)
        pending, size, received_s, is_last = bytearray(), 0, 0.0, False
        while not is_last:
            began = loop.time()
            try:
                async with asyncio.timeout(settings.body_grace_s):
                    piece = await request.receive()
            except TimeoutError as exc:
                raise _too_slow(settings) from exc
            received_s += loop.time() - began
            size += len(piece)
            if size > max_bytes + FORM_BYTES:
                raise _file_too_large(max_bytes)
            if received_s - settings.body_grace_s > size / settings.min_body_bytes_per_s:
                raise _too_slow(settings)
            is_last = not request.exchange.more_body
            pending += piece
            if len(pending) >= piece_bytes or is_last:
                yield bytes(pending)
                pending.clear()

    async def body(self, request: Request) -> HeldBody:
        """Receive the whole body; the caller must release it.

        Raises:
            RequestRejected: it is too long, too slow or compressed, or the memory budget is exhausted.
            ClientGone: the client disconnected before it was complete.
        """
        if not request.exchange.more_body:
            return self._whole_body(request)
        limit = self._settings.max_body_bytes
        heads.reject_encoded_body(request.headers.get(b"content-encoding"))
        stated = request.headers.get(b"content-length", b"0")
        if stated.isdigit() and int(stated) > limit:
            raise _too_large(limit)
        held = HeldBody(self.bodies)
        try:
            async with asyncio.timeout(self._settings.body_grace_s) as deadline:
                await self._receive(request, held, deadline)
        except TimeoutError as exc:
            held.release()
            raise _too_slow(self._settings) from exc
        except BaseException:
            held.release()
            raise
        held.received_at = monotonic()
        return held

    async def document(self, request: Request, kind: type[T], example: str) -> T:
        """Receive a small body of JSON, and return it as an object of this type.

        Args:
            example: a valid body, for the error.

        Raises:
            RequestRejected: it is not JSON of this type, or cannot be received; see `body`.
            ClientGone: the client disconnected before it was complete.
        """
        held = await self.body(request)
        try:
            check_structure(held.data)
            return msgspec.json.decode(held.data, type=kind)
        # Invalid UTF-8 is a ValueError, as msgspec's own errors are.
        except (ValueError, RecursionError) as exc:
            raise RequestRejected(
                Outcome.REJECTED_INVALID, f"the body must be like {example}: {exc}"
            ) from exc
        finally:
            held.release()

    def _whole_body(self, request: Request) -> HeldBody:
        """Return a body that has arrived."""
        heads.reject_encoded_body(request.headers.get(b"content-encoding"))
        data = request.exchange.take_body()
        if len(data) > self._settings.max_body_bytes:
            raise _too_large(self._settings.max_body_bytes)
        held = HeldBody(self.bodies)
        held.grow(len(data))
        held.data, held.received_at = data, monotonic()
        return held

    async def _receive(self, request: Request, held: HeldBody, deadline: asyncio.Timeout) -> None:
        settings, began = self._settings, asyncio.get_running_loop().time()
        limit, size = settings.max_body_bytes, 0
        pieces: list[bytes | bytearray] = []
        while True:
            piece = await request.receive()
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            held.grow(len(piece))
            is_last = not request.exchange.more_body
            if is_last and not pieces:
                held.data = piece
                return
            _collect(pieces, piece)
            deadline.reschedule(began + settings.body_grace_s + size / settings.min_body_bytes_per_s)
            if is_last:
                held.data = b"".join(pieces)
                return

    def read_now(self, request: Request) -> bool:
        """Read and check a request for a scheduled endpoint, if it need not wait for anything.

        Returns:
            False if `read` must do it, because a part of the body is missing, it is very large, or the
            spending of the key is read first.

        Raises:
            RequestRejected: it is invalid or not allowed.
        """
        if request.exchange.more_body:
            return False
        caller = self.authenticate(request)
        if caller.key is not None and caller.key.has_budget:
            return False
        try:
            request.body = self._whole_body(request)
            if _is_large(request.body.data):
                return False
            self._interpret(request, caller)
        except BaseException:
            request.body.release()
            raise
        return True

    async def read(self, request: Request) -> None:
        """Read and check a request for a scheduled endpoint.

        Raises:
            RequestRejected: it is invalid or not allowed.
            ClientGone: the client disconnected before it was complete.
        """
        caller = self.authenticate(request)
        try:
            if caller.key is not None and caller.key.has_budget:
                await self._budgets.check(caller.key)
            if request.body is NO_BODY:
                request.body = await self.body(request)
            if _is_large(request.body.data):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._large_bodies, self._interpret, request, caller)
            else:
                self._interpret(request, caller)
        except BaseException:
            request.body.release()
            raise

    def close(self) -> None:
        """Stop the thread for large bodies and the watch of the key file."""
        self._large_bodies.shutdown(wait=False, cancel_futures=True)
        self._keyring.close()

    def _interpret(self, request: Request, caller: Caller) -> None:
        """Check a body, and set what it means for the request; for large bodies, this runs on a thread."""
        held, headers, settings = request.body, request.headers, self._settings
        body = held.data
        endpoint = request.endpoint
        if not endpoint.is_form:
            check_structure(body)
        parsed = endpoint.parse(body, heads.content_type(request.exchange.headers))
        fields, spec = parsed.fields, parsed.spec
        found = self._models.find(spec.model, caller)
        tenant = caller.tenant(headers.get(b"x-tenant"), fields.end_user)
        if isinstance(fields, ResponsesFields):
            request.stored = self._stored_response(request, caller, fields)
        stored = request.stored
        background = stored is not None and stored.is_background
        models = found.models if found.route is None else _in_order(found, request, fields, tenant)
        priority = _priority(headers.get(b"x-priority"), caller, fields)
        options, target = heads.queue_options(headers), heads.latency_target(headers)
        if found.route is not None:
            target = completed(target, found.route.latency_target.limits)
        # Whether it generates text of which its client receives nothing before the end.
        may_restart = (
            not spec.streamed and not background and spec.max_output_tokens != 0 and not endpoint.is_form
        )
        revocable = priority is PriorityClass.BATCH and not options.no_wait and may_restart
        hide_usage = assembles = False
        if isinstance(fields, UsageOnRequestFields):
            hide_usage = not fields.usage_requested
            assembles = (revocable or settings.assemble_answers) and fields.may_be_assembled
        continuable = _continuable(models, parsed, body, is_whole=assembles and revocable)
        prompt = parsed.prompt if settings.prefix.enabled else Prompt()
        isolated = tenant if settings.prefix.per_tenant else ""
        if assembles:
            # To the scheduler, an assembled answer is a stream, because its first token is observed.
            spec = replace(spec, streamed=True)
        submissions = [
            Submission(
                request_id=request.request_id,
                spec=_spec_for(each, spec),
                tenant=tenant,
                priority=priority,
                queue_timeout_s=options.timeout_s,
                no_wait=options.no_wait,
                # Prefixes are hashed under the adapter's name, because an adapter has its own cache.
                prefix=prompt.prefix_hashes(model=each.name, tenant=isolated),
                key=caller.terms(tenant),
                program=program_hint(headers, fields),
                revocable=revocable or each.model.name in continuable,
                target=target,
            )
            for each in models
        ]
        request.submission = submissions[0]
        if found.route is not None:
            after_s = found.route.fallback_after_s
            request.fallbacks = Fallbacks(found.name, submissions[1:], after_s)
            if len(submissions) > 1:
                request.submission = with_limit(submissions[0], after_s)
        held.data = append_fields(body, _added_fields(parsed, body, isolated, assembles=assembles))
        request.forwarded = self.forwarded(request)
        request.form = AnswerForm(found.name, hide_usage, assembles, continuable, options.form)
        held.form_model = parsed.form_model

    def owner(self, request: Request, caller: Caller) -> str:
        """Return the tenant that owns stored responses; the end user in the body is ignored.

        Raises:
            RequestRejected: the caller may not act for the tenant.
        """
        return caller.tenant(request.headers.get(b"x-tenant"), None)

    def _stored_response(self, request: Request, caller: Caller, fields: ResponsesFields) -> StoredResponse:
        return StoredResponse(
            self._holders,
            self.owner(request, caller),
            previous=fields.previous_response_id,
            is_background=bool(fields.background),
            is_named=bool(memoryview(fields.request_id)),
        )

    def forwarded(self, request: Request) -> bytes:
        """Return the client's header lines that are forwarded to a replica.

        Raises:
            RequestRejected: a header contains a line break.
        """
        is_traced = request.trace is not None
        lines = heads.forwarded(request.exchange.headers, request.headers, is_traced=is_traced)
        if self._tracer is None or is_traced or b"traceparent" in request.headers:
            return lines
        return lines + self._tracer.unsampled_parent()


def _keyring_of(settings: GatewaySettings, before: Keyring | None = None) -> Keyring:
    """Return the keyring of these settings, which keeps the public keys of the previous one."""
    logins = None
    if settings.jwt is not None:
        from serve_app.serving.gateway.logins import Logins  # noqa: PLC0415 - PyJWT costs memory

        logins = Logins(settings.jwt, None if before is None else before.logins)
    return Keyring(settings.keys, path=settings.keys_path, logins=logins)


def _is_large(body: bytes) -> bool:
    """Return whether a body is checked and parsed on a thread."""
    size = len(body)
    return size > _LARGE_BODY_BYTES and (size > _LARGE_TEXT_BYTES or not is_plain(body))


def _spec_for(found: FoundModel, spec: RequestSpec) -> RequestSpec:
    """Return the requirements under the name of the model that serves them."""
    if found.model.name == spec.model and found.adapter is None:
        return spec
    return replace(spec, model=found.model.name, adapter=found.adapter)


def _collect(pieces: list[bytes | bytearray], piece: bytes) -> None:
    """Append a piece of a body; short pieces are joined, because each object takes many times its length."""
    if len(piece) >= _OWN_PIECE_BYTES:
        pieces.append(piece)
    elif pieces and isinstance(pieces[-1], bytearray):
        pieces[-1] += piece
    elif piece:
        pieces.append(bytearray(piece))


def _in_order(found: FoundName, request: Request, fields: BodyFields, tenant: str) -> tuple[FoundModel, ...]:
    """Return the models of a route that may serve a request, the preferred one first."""
    assert found.route is not None
    session = session_of(request.headers)
    models = found.order(found.route.subject(session, fields.end_user, tenant, request.request_id))
    if request.stored is None or request.stored.previous is None:
        return models
    # Any model of the route may have the response that the request continues; see `StoredResponses.bind`.
    names = {model.name for model in models}
    return (*models, *(model for model in found.models if model.name not in names))


def _priority(header: bytes | None, caller: Caller, fields: BodyFields) -> PriorityClass:
    requested = heads.requested_class(header, fields.service_tier, fields.priority)
    if requested is None:
        return caller.default_class
    caller.check_class(*requested)
    return requested[0]


_raw_fields_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _continuable(
    models: Iterable[FoundModel], parsed: ParsedBody, body: bytes, *, is_whole: bool
) -> dict[str, int | None]:
    """Return the models whose engines may continue an answer; see `AnswerForm.continuable`.

    Args:
        is_whole: it is assembled and revocable, so it can be continued without `resume_streams`.
    """
    spec = parsed.spec
    is_stream = spec.streamed and isinstance(parsed.fields, UsageOnRequestFields)
    served = {
        each.model.name: each.model.max_model_len
        for each in models
        if is_whole or (is_stream and each.model.resume_streams)
    }
    if not served or spec.choices != 1 or spec.shape.media_items:
        return {}
    # The answer must depend on the tokens before it alone.
    return served if _raw_fields_decoder.decode(body).keys() <= CONTINUABLE_FIELDS else {}


def _added_fields(parsed: ParsedBody, body: bytes, isolated: str, *, assembles: bool) -> list[bytes]:
    """Return fields that the engine needs and the client did not send.

    Args:
        isolated: tenant that shares no prefixes with others; empty if all share them.
    """
    fields, added = parsed.fields, []
    if isinstance(fields, UsageOnRequestFields) and fields.stream and not fields.usage_requested:
        added.append(usage_field(body, has_stream_options=fields.stream_options is not None))
    if fields.priority:
        # The priority was read as the request's class. Engines reject the field unless they schedule by
        # priority, and there it would overtake other requests, so the client's number is never forwarded.
        added.append(priority_field(NO_PRIORITY))
    if assembles:
        added.append(AS_STREAM)
    if isolated and parsed.form_model is None:
        added.append(salt_field(engine_salt(isolated, fields.cache_salt or "")))
    return added


def _too_slow(settings: GatewaySettings) -> RequestRejected:
    return RequestRejected(
        Outcome.REJECTED_INVALID,
        f"the body arrived more slowly than {settings.min_body_bytes_per_s:g} bytes/s after the first "
        f"{settings.body_grace_s:g} s: use a faster connection, or a smaller body",
        code="body_too_slow",
        status=408,
    )


def _too_large(limit: int) -> RequestRejected:
    return RequestRejected(
        Outcome.REJECTED_BODY_TOO_LARGE,
        f"the body is longer than {limit} bytes: send less, or raise gateway.advanced.max_body_bytes",
    )


def _file_too_large(limit: int) -> RequestRejected:
    return RequestRejected(
        Outcome.REJECTED_BODY_TOO_LARGE,
        f"the file is longer than {limit:,} bytes: split it",
        param="file",
    )
