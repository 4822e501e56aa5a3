"""Logins by OpenID Connect: valid tokens, the known attacks on JWT, public keys, and a gateway over HTTP."""

import asyncio
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import httpx
import jwt
import pytest
import yaml
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from serve_app.core.settings_base import plain
from serve_app.errors import SettingsError
from serve_app.request import PriorityClass
from serve_app.serving.api_keys import KeyRecord
from serve_app.serving.gateway import logins as module
from serve_app.serving.gateway.answer.responses import RequestRejected
from serve_app.serving.gateway.keys import ApiKey, Caller, Keyring
from serve_app.serving.gateway.logins import Logins
from serve_app.serving.gateway.settings import GatewayConfig, JwtSettings, LoginGroup
from serve_app.settings.application import settings_of
from tests.docs.documents import code_blocks
from tests.e2e.served import wait_for
from tests.serving.certificates import Authority
from tests.serving.channel.harness import wait_until

from .builders import MODEL, Answers, chat
from .conftest import running_gateway
from .issuer import AUDIENCE, CERTS, ISSUER, Issuer, b64, private_key, public_jwk

GROUPS = (
    LoginGroup(name="llm-admins", admin=True),
    LoginGroup(name="llm-batch", highest_class=PriorityClass.BATCH, models=("m",), weight=2.0),
    LoginGroup(
        name="llm-users", requests_per_minute=9, cost_per_day=1.5, default_class=PriorityClass.DEFAULT
    ),
)


def settings_with(**changes: Any) -> JwtSettings:
    values = {"issuer": ISSUER, "audience": AUDIENCE, "tenant_claim": "department", "groups": GROUPS}
    return JwtSettings(**{**values, **changes})


@pytest.fixture
def issuer() -> Issuer:
    return Issuer()


@pytest.fixture
def path(tmp_path: Path, issuer: Issuer) -> Path:
    path = tmp_path / "certs.json"
    path.write_bytes(issuer.jwks())
    return path


@pytest.fixture
def logins(path: Path) -> Logins:
    """Return logins that have read the public keys once."""
    made = Logins(settings_with(jwks_file=str(path)))
    made._read()
    return made


def rejection(logins: Logins, token: bytes) -> RequestRejected:
    with pytest.raises(RequestRejected) as caught:
        logins.caller(token)
    return caught.value


# -- valid tokens ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kid", ["RS256", "ES256", "EdDSA"])
def test_a_token_becomes_a_caller_with_the_permissions_of_its_group(
    logins: Logins, issuer: Issuer, kid: str
) -> None:
    caller = logins.caller(issuer.token(kid))
    assert caller.key is not None
    assert (caller.key.id, caller.tenant(None, "anna")) == ("login/llm-users/research", "research")
    assert (caller.is_admin, caller.default_class) == (False, PriorityClass.DEFAULT)
    terms = caller.terms("research")
    assert terms is not None
    assert (terms.key_id, terms.limits.requests_per_minute) == (caller.key.id, 9)
    assert caller.key.budget("day").cost == 1.5
    with pytest.raises(RequestRejected, match="may not act for tenant other"):
        caller.tenant(b"other", None)


def test_a_group_has_every_permission_of_a_key() -> None:
    identity = {"id", "hash", "tenant", "created_at", "expires_at", "revoked_at"}
    assert {each.name for each in fields(LoginGroup)} == set(KeyRecord.__struct_fields__) - identity


@pytest.mark.parametrize(
    ("groups", "group"),
    [
        (["llm-users", "llm-batch"], "llm-batch"),
        (["llm-users", "llm-admins", "llm-batch"], "llm-admins"),
        ("llm-batch", "llm-batch"),
        ([None, ["llm-admins"], 5, "llm-users"], "llm-users"),
    ],
)
def test_the_first_configured_group_of_a_token_decides(
    logins: Logins, issuer: Issuer, groups: Any, group: str
) -> None:
    caller = logins.caller(issuer.token(groups=groups))
    assert caller.has_id(f"login/{group}/research")
    assert caller.is_admin is (group == "llm-admins")
    assert caller.may_use("other") is (group != "llm-batch")


@pytest.mark.parametrize(
    ("claim", "highest", "default", "key_id"),
    [
        (None, "interactive", "default", "login/llm-users/research"),
        ("interactive", "interactive", "default", "login/llm-users/research"),
        ("default", "default", "default", "login/llm-users:default/research"),
        ("batch", "batch", "batch", "login/llm-users:batch/research"),
    ],
)
def test_the_class_claim_lowers_the_class(
    path: Path, issuer: Issuer, claim: str | None, highest: str, default: str, key_id: str
) -> None:
    logins = Logins(settings_with(jwks_file=str(path), class_claim="llm_class"))
    caller = logins.caller(issuer.token(llm_class=claim))
    assert caller.key is not None
    assert (caller.key.highest_class, caller.default_class, caller.key.id) == (highest, default, key_id)
    assert logins.caller_with(key_id).key_terms == caller.key_terms
    assert logins.caller_with(key_id).default_class == default
    # No claim raises the class of a group.
    batch = logins.caller(issuer.token(llm_class=claim, groups="llm-batch"))
    assert batch.key is not None
    assert (batch.key.highest_class, batch.key.id) == ("batch", "login/llm-batch/research")


NO_TENANTS: tuple[Any, ...] = (12, "", "a b", "x" * 129, ["a"], {})
CLAIMS = "aud, exp, groups, iat, iss, sub"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"department": None}, f"no claim department; its claims: {CLAIMS}"),
        *(({"department": value}, "is not a tenant name") for value in NO_TENANTS),
        ({"groups": None}, "no claim groups; its claims: aud, department"),
        *(
            ({"groups": value}, "groups: llm-admins, llm-batch, llm-users")
            for value in ([], "none", ["other"], 5, {"llm-admins": True}, "llm-admins llm-users")
        ),
        *(
            ({"llm_class": value}, "classes: interactive, default, batch")
            for value in ("high", "", 1, ["batch"], True)
        ),
    ],
)
def test_claims_without_permission_get_403_with_what_is_known(
    path: Path, issuer: Issuer, changes: dict[str, Any], words: str
) -> None:
    logins = Logins(settings_with(jwks_file=str(path), class_claim="llm_class"))
    refused = rejection(logins, issuer.token(**changes))
    assert refused.status == 403
    assert words in str(refused)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exp": -59}, ""),
        ({"exp": -61}, "has expired"),
        ({"nbf": 57, "iat": 57}, ""),
        ({"nbf": 63}, "not valid yet"),
        ({"iat": 63}, "not valid yet"),
    ],
)
def test_clocks_may_differ_by_a_minute(
    logins: Logins, issuer: Issuer, changes: dict[str, int], words: str
) -> None:
    moments: dict[str, Any] = {name: int(time.time()) + offset for name, offset in changes.items()}
    token = issuer.token(**moments)
    if not words:
        assert logins.caller(token)
    else:
        assert words in str(rejection(logins, token))


# -- attacks -----------------------------------------------------------------------------------------------


def unsigned(issuer: Issuer, algorithm: str) -> bytes:
    header = json.dumps({"alg": algorithm, "kid": "RS256"})
    return b64(header) + b"." + b64(json.dumps(issuer.claims())) + b"."


def signed_with_the_public_key(issuer: Issuer, form: str) -> bytes:
    key = private_key("RS256").public_key()
    secret = {
        "PEM": key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
        "DER": key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo),
        "JWK": json.dumps(public_jwk("RS256", "RS256", private_key("RS256"))).encode(),
    }[form]
    signed = b64('{"alg":"HS256","kid":"RS256"}') + b"." + b64(json.dumps(issuer.claims()))
    hmac = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    return signed + b"." + b64(hmac.sign(signed, secret))


def of_the_attacker(issuer: Issuer, **header: Any) -> bytes:
    """Return a token signed by the attacker's key, with claims of an admin."""
    claims = issuer.claims(groups=["llm-admins"])
    key = private_key("RS256", "attacker")
    return jwt.encode(claims, key, "RS256", headers={"kid": "RS256", **header}).encode()


def with_the_signature_of_another(issuer: Issuer) -> bytes:
    header, _, signature = issuer.token().split(b".")
    return b".".join((header, b64(json.dumps(issuer.claims(groups=["llm-admins"]))), signature))


def with_signature(issuer: Issuer, kid: str, signature: bytes) -> bytes:
    return b".".join((*issuer.token(kid).split(b".")[:2], b64(signature)))


def with_algorithm(issuer: Issuer, algorithm: str, kid: str) -> bytes:
    """Return a token that an algorithm signs properly, but not that of the key with this id."""
    key = private_key({"ES256": "ES256", "EdDSA": "EdDSA"}.get(algorithm, "RS256"))
    return jwt.encode(issuer.claims(), key, algorithm, headers={"kid": kid}).encode()


def with_header(issuer: Issuer, text: str) -> bytes:
    return issuer.raw(text)


def with_claim(issuer: Issuer, name: str, text: str) -> bytes:
    """Return a token with this JSON text as a claim."""
    payload = json.dumps(issuer.claims(**{name: "PLACE"})).replace('"PLACE"', text)
    return issuer.raw('{"alg":"RS256","kid":"RS256"}', payload.encode())


ATTACKER_S_KEYS = "http://127.0.0.1:9/keys"
NO_KEY = "does not publish"
Forgery = Callable[[Issuer], bytes]
FORGERIES: dict[str, tuple[Forgery, str]] = {
    **{
        f"alg {name}": (partial(unsigned, algorithm=name), "algorithm")
        for name in ("none", "None", "nOnE", "")
    },
    **{
        f"HS256 with the {form} of the public key": (
            partial(signed_with_the_public_key, form=form),
            "algorithm",
        )
        for form in ("PEM", "DER", "JWK")
    },
    **{
        f"kid {kid!r}": (partial(of_the_attacker, kid=kid), NO_KEY)
        for kid in (
            "../../../dev/null",
            "/dev/null",
            "' OR 1=1 --",
            "|id",
            "http://evil",
            "",
            "\x00",
            "rs256",
        )
    },
    "no kid": (partial(with_header, text='{"alg":"RS256"}'), NO_KEY),
    "kid of another type": (partial(with_header, text='{"alg":"RS256","kid":["RS256"]}'), "malformed"),
    "jku": (partial(of_the_attacker, jku=ATTACKER_S_KEYS), "wrong signature"),
    "x5u": (partial(of_the_attacker, x5u=ATTACKER_S_KEYS), "wrong signature"),
    "embedded jwk": (
        partial(of_the_attacker, jwk=public_jwk("RS256", "RS256", private_key("RS256", "attacker"))),
        "wrong signature",
    ),
    "embedded x5c": (partial(of_the_attacker, x5c=["MIIB"]), "wrong signature"),
    "another payload": (with_the_signature_of_another, "wrong signature"),
    "an empty signature": (partial(with_signature, kid="RS256", signature=b""), "wrong signature"),
    "a signature of zeros (CVE-2022-21449)": (
        partial(with_signature, kid="ES256", signature=bytes(64)),
        "wrong signature",
    ),
    "another signature": (partial(with_signature, kid="EdDSA", signature=b"x" * 64), "wrong signature"),
    **{
        f"{algorithm} with the key of {kid}": (
            partial(with_algorithm, algorithm=algorithm, kid=kid),
            "malformed",
        )
        for algorithm in ("RS256", "ES256", "EdDSA")
        for kid in ("RS256", "ES256", "EdDSA")
        if algorithm != kid
    },
    **{
        name: (partial(with_algorithm, algorithm=name, kid="RS256"), "algorithm")
        for name in ("RS512", "PS256")
    },
    "alg twice": (partial(with_header, text='{"alg":"RS256","kid":"RS256","alg":"none"}'), "algorithm"),
    "alg of another type": (partial(with_header, text='{"alg":["RS256"],"kid":"RS256"}'), "algorithm"),
    "crit": (partial(with_header, text='{"alg":"RS256","kid":"RS256","crit":["x"],"x":1}'), ""),
    "crit b64": (partial(with_header, text='{"alg":"RS256","kid":"RS256","crit":["b64"],"b64":false}'), ""),
    "b64": (partial(with_header, text='{"alg":"RS256","kid":"RS256","b64":false}'), ""),
    "nested header": (partial(with_header, text='{"alg":' + "[" * 9_000), "malformed"),
    "header that is a list": (partial(with_header, text="[1]"), "malformed"),
    "header that is no JSON": (partial(with_header, text='{"alg"'), "malformed"),
    "header that is not UTF-8": (lambda issuer: b"eyJ_" + issuer.token()[4:], ""),
    "huge": (lambda issuer: issuer.token(padding="x" * 20_000), "at most 16,384"),
    "padding": (lambda issuer: issuer.token() + b"!", "malformed"),
    "spaces": (lambda issuer: issuer.token().replace(b".", b". "), ""),
    "issuer": (lambda issuer: issuer.token(iss="https://evil"), f"of another issuer: log in at '{ISSUER}'"),
    "issuer list": (partial(with_claim, name="iss", text=f'["{ISSUER}"]'), "another issuer"),
    "issuer with a slash": (lambda issuer: issuer.token(iss=ISSUER + "/"), "another issuer"),
    "audience": (lambda issuer: issuer.token(aud="other"), f"request one for '{AUDIENCE}'"),
    "audience list": (lambda issuer: issuer.token(aud=["other", "account"]), "another audience"),
    "audience object": (lambda issuer: issuer.token(aud={AUDIENCE: 1}), "another audience"),
    "part of the audience": (lambda issuer: issuer.token(aud="xllm-gatewayx"), "another audience"),
    "no exp": (lambda issuer: issuer.token(exp=None), "lacks the claim exp"),
    "no iss": (lambda issuer: issuer.token(iss=None), "lacks the claim iss"),
    "no aud": (lambda issuer: issuer.token(aud=None), "lacks the claim aud"),
    "expired": (lambda issuer: issuer.token(exp=1), "has expired"),
    "exp true": (lambda issuer: issuer.token(exp=True), "has expired"),
    **{
        f"exp {exp}": (partial(with_claim, name="exp", text=exp), "")
        for exp in ("null", '"soon"', "Infinity", "NaN", "-1e400", "{}", "9" * 5_000)
    },
    "subject that is no text": (lambda issuer: issuer.token(sub=5), "malformed"),
    **{
        name: (partial(Issuer.raw, header='{"alg":"RS256","kid":"RS256"}', payload=payload), "malformed")
        for name, payload in {
            "payload that is not UTF-8": b'{"iss": "\xff"}',
            "payload that is a list": b"[]",
            "payload that is no JSON": b"{",
            "nested payload": b'{"iss":' + b"[" * 9_000,
            "empty payload": b"",
        }.items()
    },
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_token_gets_401(logins: Logins, issuer: Issuer, name: str) -> None:
    forge, words = FORGERIES[name]
    token = forge(issuer)
    for _ in range(2):
        refused = rejection(logins, token)
        assert (refused.status, refused.code) == (401, None)
        assert words in str(refused)
    assert "verified=0" in repr(logins)


def test_the_last_of_two_equal_claims_counts(logins: Logins, issuer: Issuer) -> None:
    """RFC 7519, section 4; the signature covers both."""
    for groups, is_admin in ((("llm-users", "llm-admins"), True), (("llm-admins", "llm-users"), False)):
        both = ", ".join(f'"groups": "{each}"' for each in groups)
        payload = json.dumps(issuer.claims(groups="G")).replace('"groups": "G"', both)
        token = issuer.raw('{"alg":"RS256","kid":"RS256"}', payload.encode())
        assert logins.caller(token).is_admin is is_admin


@pytest.mark.parametrize(
    "jwk",
    [
        public_jwk("k", "RS256", private_key("RS256", "weak")),
        public_jwk("k", "RS256", private_key("RS256", "attacker"), use="enc"),
        public_jwk("k", "RS256", private_key("RS256", "attacker"), alg="RS512"),
        {"kty": "oct", "kid": "k", "k": "c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0"},
        {
            **json.loads(jwt.algorithms.RSAAlgorithm.to_jwk(private_key("RS256", "attacker"))),
            "kid": "k",
            "alg": "RS256",
        },
    ],
    ids=["weak", "for encryption", "another algorithm", "symmetric", "private"],
)
@pytest.mark.filterwarnings("ignore::jwt.warnings.InsecureKeyLengthWarning")
def test_unsuitable_keys_verify_nothing(tmp_path: Path, issuer: Issuer, jwk: dict[str, Any]) -> None:
    path = tmp_path / "certs.json"
    path.write_text(json.dumps({"keys": [jwk, public_jwk("RS256", "RS256", private_key("RS256"))]}))
    logins = Logins(settings_with(jwks_file=str(path)))
    logins._read()
    assert logins.caller(issuer.token())
    name = (
        "weak" if jwk.get("n") == public_jwk("k", "RS256", private_key("RS256", "weak"))["n"] else "attacker"
    )
    issuer.keys["k"] = ("RS256", private_key("RS256", name))
    assert rejection(logins, issuer.token("k")).status == 401


_NAMES = st.sampled_from(["alg", "kid", "crit", "b64", "exp", "iss", "aud", "sub", "groups"]) | st.text(
    max_size=4
)
_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["RS256", "EdDSA", "none", ISSUER, AUDIENCE])
)
_JSON = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_NAMES, inner, max_size=5),
    max_leaves=12,
)
_SEGMENT = st.binary(max_size=60).map(b64) | _JSON.map(lambda value: b64(json.dumps(value)))


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.tuples(_SEGMENT, _SEGMENT, _SEGMENT | st.just(b"")), st.data())
def test_any_other_token_is_rejected_and_never_an_error(
    logins: Logins, issuer: Issuer, segments: tuple[bytes, ...], data: st.DataObject
) -> None:
    rejection(logins, b".".join(segments))
    # Arbitrary claims with a valid signature.
    claims = data.draw(st.dictionaries(st.sampled_from([*issuer.claims(), "nbf", "jti"]), _JSON, max_size=4))
    payload = json.dumps({**issuer.claims(), **claims})
    try:
        caller = logins.caller(issuer.raw('{"alg":"EdDSA","kid":"EdDSA"}', payload.encode(), "EdDSA"))
    except RequestRejected:
        pass
    else:
        assert not caller.is_admin or "llm-admins" in payload
    # A good token with a part replaced.
    token = bytearray(issuer.token("EdDSA"))
    place = data.draw(st.integers(0, len(token) - 1))
    changed = bytes(token[:place]) + data.draw(st.binary(min_size=1, max_size=4)) + bytes(token[place + 1 :])
    if changed != bytes(token):
        rejection(logins, changed)


# -- cache, and requests that outlive their token -----------------------------------------------------------


def test_a_token_is_verified_once_until_it_expires(
    logins: Logins, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = Mock(wraps=jwt.decode)
    monkeypatch.setattr(jwt, "decode", decode)
    now = int(time.time())
    token = issuer.token(exp=now + 30)
    caller = logins.caller(token)
    # The same keys are read again.
    logins._read()
    assert logins.caller(token) is caller
    assert decode.call_count == 1
    monkeypatch.setattr(module, "time", lambda: now + 89.9)
    logins.caller(token)
    assert decode.call_count == 1
    # 60 s after the claim; PyJWT's own clock has not moved.
    monkeypatch.setattr(module, "time", lambda: now + 90.0)
    logins.caller(token)
    assert decode.call_count == 2


def test_the_cache_is_bounded_and_forgets_the_least_recently_used(
    logins: Logins, issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_VERIFIED", 2)
    first, second, third = (issuer.token("EdDSA", department=name) for name in "abc")
    kept = [logins.caller(token) for token in (first, second, first, third)]
    assert "verified=2" in repr(logins)
    assert logins.caller(first) is kept[0]
    assert logins.caller(second) is not kept[1]


def test_a_request_may_outlive_its_token_with_the_permissions_of_its_group(
    path: Path, issuer: Issuer
) -> None:
    logins = Logins(settings_with(jwks_file=str(path)))
    token = issuer.token(exp=int(time.time()) - module.CLOCK_SKEW_S + 3, groups=["llm-batch"])
    keyring = Keyring((), {}, logins=logins)
    caller = keyring.caller(b"Bearer " + token)
    wait_for(lambda: not is_accepted(logins, token), 10, "the cached token expires")
    assert "has expired" in str(rejection(logins, token))
    assert caller.key is not None
    later = keyring.caller_with(caller.key.id)
    assert (later.key_terms, later.default_class) == (caller.key_terms, caller.default_class)
    assert (later.tenant(None, None), later.may_use("other")) == ("research", False)
    keyring.close()

    changed = (LoginGroup(name="llm-batch", concurrent=3), LoginGroup(name="new"))
    keyring = Keyring((), {}, logins=Logins(settings_with(jwks_file=str(path), groups=changed)))
    terms = keyring.caller_with(caller.key.id).key_terms
    assert terms is not None
    assert (terms.limits.concurrent, terms.weight) == (3, None)
    with pytest.raises(RequestRejected, match=r"group llm-users .* no longer exists; groups: llm-batch, new"):
        keyring.caller_with("login/llm-users/research")
    keyring.close()
    with pytest.raises(RequestRejected, match="no longer exists"):
        Keyring((), {}).caller_with(caller.key.id)


@pytest.mark.parametrize("group", ["/team/llm admins", "a:batch", "größe", "100%", "login/x/y", "a\nb"])
@pytest.mark.parametrize("tenant", ["a", "x/y:batch", "a%2Fb"])
def test_unusual_names_have_ids_of_their_own(path: Path, issuer: Issuer, group: str, tenant: str) -> None:
    groups = (LoginGroup(name=group, admin=True), LoginGroup(name="a"))
    logins = Logins(settings_with(jwks_file=str(path), groups=groups))
    caller = logins.caller(issuer.token(groups=[group], department=tenant))
    assert caller.key is not None
    assert caller.key.id.isascii()
    assert caller.key.id.isprintable()
    assert " " not in caller.key.id
    later = logins.caller_with(caller.key.id)
    assert (later.tenant(None, None), later.is_admin, later.has_id(caller.key.id)) == (tenant, True, True)


# -- public keys -------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the times of the thread."""
    monkeypatch.setattr(module, "POLL_S", 0.02)
    monkeypatch.setattr(module, "_MAX_BACKOFF_S", 0.05)
    monkeypatch.setattr(module, "_TIMEOUT_S", 1.0)


@contextmanager
def running(settings: JwtSettings, before: Logins | None = None) -> Iterator[Logins]:
    made = Logins(settings, before)
    made.start()
    try:
        yield made
    finally:
        made.close()


def is_accepted(logins: Logins, token: bytes) -> bool:
    try:
        return bool(logins.caller(token))
    except RequestRejected:
        return False


def url_of(port: int) -> str:
    return f"http://127.0.0.1:{port}{CERTS}"


def test_a_file_of_keys_is_reloaded_and_a_withdrawn_key_ends_cached_tokens(
    path: Path, issuer: Issuer, quick: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    with running(settings_with(jwks_file=str(path))) as logins:
        old, other = issuer.token("RS256"), issuer.token("EdDSA")
        assert logins.caller(old)
        del issuer.keys["RS256"]
        issuer.keys["new"] = ("ES256", private_key("ES256", "new"))
        path.write_bytes(issuer.jwks())
        wait_for(lambda: is_accepted(logins, issuer.token("new")), 10, "the file is read")
        refused = rejection(logins, old)
        assert (refused.status, NO_KEY in str(refused)) == (401, True)
        path.write_text("{}")
        wait_for(lambda: "event=jwks_unavailable" in caplog.text, 10, "the file is read")
        assert "not a set of public keys" in caplog.text
        assert "the current 3 keys stay in effect" in caplog.text
        assert logins.caller(other)
    assert f"event=jwks_loaded source={path} keys=3" in caplog.text


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "No such file"),
        ("", "not a set of public keys"),
        ("[1]", "not a set of public keys"),
        ('{"keys": 5}', "not a set of public keys"),
        ('{"keys": []}', "not a set of public keys"),
        ('{"keys": [{"kty": "RSA", "kid": "a", "n": 5, "e": []}]}', "not a set of public keys"),
        (json.dumps({"keys": [{"kty": "oct", "k": "YQ", "kid": "a"}]}), "no public key with an id"),
    ],
)
def test_a_file_without_keys_stops_the_start(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "certs.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SettingsError, match=rf"gateway.jwt.jwks_file {path} cannot be used: .*{words}"):
        Logins(settings_with(jwks_file=str(path)))


def test_a_new_key_of_the_server_is_read_when_a_token_has_it(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with issuer.serving() as port, running(settings_with(jwks_url=url_of(port))) as logins:
        wait_for(lambda: is_accepted(logins, issuer.token()), 10, "the keys are read")
        issuer.keys["new"] = ("ES256", private_key("ES256", "new"))
        token = issuer.token("new")
        # The server was read just now.
        assert rejection(logins, token).status == 401
        assert issuer.requests == [CERTS]
        monkeypatch.setattr(module, "_CURRENT_S", 0.0)
        refused = rejection(logins, token)
        assert (refused.status, refused.code, refused.retry_after_s) == (503, "login_unavailable", 1.0)
        assert "they are being read" in str(refused)
        wait_for(lambda: len(issuer.requests) == 2, 10, "the keys are read")
        wait_for(lambda: "keys=4" in repr(logins), 10, "the keys are read")
        assert logins.caller(token)
        monkeypatch.setattr(module, "_CURRENT_S", 60.0)
        for _ in range(20):
            assert rejection(logins, of_the_attacker(issuer, kid="?")).status == 401
        time.sleep(0.1)
        assert issuer.requests == [CERTS, CERTS]


@pytest.mark.parametrize("way", ["refused", "500", "silent", "slow", "long", "moved", "no JSON"])
def test_known_keys_go_on_while_the_server_is_down(
    issuer: Issuer,
    quick: None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    way: str,
) -> None:
    token = issuer.token()
    with issuer.serving() as port:
        settings = settings_with(jwks_url=url_of(port))
        with running(settings) as logins:
            wait_for(lambda: is_accepted(logins, token), 10, "the keys are read")
    # A change of the settings keeps the keys.
    with running(settings, logins) as logins:
        assert logins.caller(token)
    issuer.status = {"500": 500, "silent": None}.get(way, 200)
    issuer.body = {"long": issuer.jwks() + b" " * 2_000_000, "no JSON": b"<html>"}.get(way)
    issuer.byte_s = 0.01 if way == "slow" else 0.0
    issuer.moved_to = f"http://127.0.0.1:{port}/elsewhere" if way == "moved" else ""
    with issuer.serving(port if way != "refused" else 0), running(settings, logins) as later:
        wait_for(lambda: caplog.text.count("event=jwks_unavailable") > 2, 10, "attempts")
        assert later.caller(token)
        assert later.caller(issuer.token("ES256"))
        monkeypatch.setattr(module, "_CURRENT_S", 0.0)
        refused = rejection(later, of_the_attacker(issuer, kid="?"))
        assert (refused.status, refused.retry_after_s) == (503, 1.0)
        assert f"known keys of {ISSUER}: they cannot be read (" in str(refused)
        assert "/elsewhere" not in issuer.requests


def test_a_server_that_is_down_at_the_start_is_read_once_it_is_up(issuer: Issuer, quick: None) -> None:
    with issuer.serving() as port:
        pass
    with running(settings_with(jwks_url=url_of(port))) as logins:
        wait_for(lambda: "cannot be read" in str(rejection(logins, issuer.token())), 10, "an attempt")
        assert rejection(logins, issuer.token()).status == 503
        with issuer.serving(port):
            wait_for(lambda: is_accepted(logins, issuer.token()), 10, "the keys are read")


def test_the_server_needs_a_certificate_of_a_known_authority(
    issuer: Issuer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tls = Authority(tmp_path).process("localhost")
    with issuer.serving(tls=tls) as port:
        settings = settings_with(jwks_url=f"https://localhost:{port}{CERTS}")
        with running(settings) as logins:
            wait_for(lambda: "CERTIFICATE_VERIFY" in str(rejection(logins, issuer.token())), 10, "an attempt")
        monkeypatch.setenv("SSL_CERT_FILE", tls.ca or "")
        with running(settings) as logins:
            wait_for(lambda: is_accepted(logins, issuer.token()), 10, "the keys are read")


def test_unknown_keys_do_not_hasten_the_next_attempt(issuer: Issuer) -> None:
    issuer.status = 500
    with issuer.serving() as port, running(settings_with(jwks_url=url_of(port))) as logins:
        wait_for(lambda: "HTTP Error 500" in str(rejection(logins, issuer.token())), 10, "an attempt")
        attempts = len(issuer.requests)
        for _ in range(20):
            assert rejection(logins, issuer.token()).status == 503
        # The pause is a second at least.
        time.sleep(0.2)
        assert len(issuer.requests) == attempts


def test_attempts_become_rarer(
    issuer: Issuer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pauses: list[float] = []
    logins = Logins(settings_with(jwks_url="http://127.0.0.1:9/"))

    def wait(pause_s: float) -> None:
        pauses.append(pause_s)
        if len(pauses) == 8:
            logins.close()

    monkeypatch.setattr(logins._wake, "wait", wait)
    logins._follow()
    assert all(
        limit / 2 <= pause <= limit for pause, limit in zip(pauses, (2, 4, 8, 16, *[30] * 4), strict=True)
    )


def test_the_keys_of_another_source_are_not_kept(issuer: Issuer, path: Path) -> None:
    before = Logins(settings_with(jwks_file=str(path)))
    after = Logins(settings_with(jwks_url="http://127.0.0.1:9/"), before)
    assert rejection(after, issuer.token()).status == 503


# -- a gateway ---------------------------------------------------------------------------------------------


def config_of_the_page(port: int) -> GatewayConfig:
    """Return the example of the documentation, with the scripted login server."""
    (block,) = (each for each in code_blocks("docs/security.md") if "jwt:" in each.text)
    text = block.text.replace("https://login.example.com", f"http://127.0.0.1:{port}")
    example = yaml.safe_load(text)
    pool = {"name": "only", "engine": {"emulated": {"profile": "laptop", "max_model_len": 8_192}}}
    return settings_of({"models": [{"name": "demo", "pools": [pool]}], **example}).gateway


def bearer(secret: bytes | str) -> dict[str, str]:
    return {"authorization": f"Bearer {secret.decode() if isinstance(secret, bytes) else secret}"}


async def until_known(http: httpx.AsyncClient, token: bytes) -> None:
    """Wait until the gateway has read the public keys."""
    async with asyncio.timeout(10):
        while (answer := await http.get("/v1/models", headers=bearer(token))).status_code == 503:
            assert answer.headers["retry-after"] == "1"
            assert answer.json()["error"]["code"] == "login_unavailable"
            await asyncio.sleep(0.01)
    assert answer.status_code == 200


async def test_the_example_of_the_documentation_over_http(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("EWSJF_API_KEY_NIGHTLY", "k1")
    caplog.set_level(logging.INFO, "ray.serve")
    issuer = Issuer()
    with issuer.serving() as port:
        config = config_of_the_page(port)
        assert config.jwt is not None
        issuer.issuer = config.jwt.issuer
        async with running_gateway(keys=config.keys, jwt=config.jwt, queries=Answers()) as harness:
            http = harness.http
            user, admin = issuer.token(), issuer.token("ES256", groups=["llm-admins"])

            async def status(path: str, secret: bytes | str) -> int:
                return (await http.get(path, headers=bearer(secret))).status_code

            await until_known(http, user)
            for secret, key in ((user, "login/llm-users/research"), ("k1", "config/nightly")):
                body = chat() if secret == user else chat(service_tier="flex")
                answered = await http.post("/v1/chat/completions", json=body, headers=bearer(secret))
                assert answered.status_code == 200, answered.text
                submission = harness.dispatcher.submissions[-1]
                assert submission.key is not None
                assert submission.key.key_id == key
                await wait_until(lambda key=key: f" key={key} " in caplog.text, "the request is logged")  # type: ignore[misc]
            assert (await http.get("/v1/models")).status_code == 401
            assert f"or send a token of {issuer.issuer}" in (await http.get("/v1/models")).text
            outsider = await http.get("/v1/models", headers=bearer(issuer.token(groups=["x"])))
            assert outsider.status_code == 403
            assert "groups: llm-admins, llm-batch, llm-users" in outsider.text
            batch = bearer(issuer.token(groups=["llm-batch"]))
            refused = await http.post("/v1/chat/completions", json=chat(), headers=batch)
            assert (refused.status_code, f"model '{MODEL}'" in refused.text) == (403, True)
            refused = await http.get("/v1/models", headers=bearer(of_the_attacker(issuer)))
            assert refused.status_code == 401
            # Pages of admins; the dashboard sends its key as a bearer token.
            for path in ("/debug/queue", "/metrics", "/metrics/engines", "/admin/mode"):
                assert (await status(path, admin), await status(path, user)) == (200, 403), path
            async with http.stream("GET", "/dashboard/events", headers=bearer(admin)) as frames:
                assert frames.status_code == 200
            assert await status("/dashboard/events", user) == 403
            await http.post("/debug/tuner/freeze", headers=bearer(admin))
            assert r"by=login/llm-admins/research client=127.0.0.1" in caplog.text
            assert "user='f3c1 \u00fc'" in caplog.text


async def test_a_change_of_the_permissions_applies_without_the_login_server() -> None:
    issuer = Issuer()
    with issuer.serving() as port:
        jwt_settings = settings_with(jwks_url=url_of(port))
        key = ApiKey(tenant="a", key="k1")
        async with running_gateway(jwt=jwt_settings, keys=(key,)) as harness:
            user = bearer(issuer.token())
            await until_known(harness.http, issuer.token())
            served = harness.gateway
            # Still read from the first settings.
            issuer.status = 500
            reduced = {**plain(jwt_settings), "groups": [{"name": "llm-admins", "admin": True}]}
            served.change({"jwt": reduced})
            assert (await harness.http.get("/v1/models", headers=user)).status_code == 403
            admin = bearer(issuer.token(groups=["llm-admins"]))
            assert (await harness.http.get("/v1/models", headers=admin)).status_code == 200
            with pytest.raises(SettingsError, match="cannot be used"):
                served.change({"jwt": {**reduced, "jwks_url": None, "jwks_file": "/missing/certs.json"}})
            assert (await harness.http.get("/v1/models", headers=admin)).status_code == 200
            served.change({"jwt": None})
            answer = await harness.http.get("/v1/models", headers=admin)
            assert (answer.status_code, "unknown API key" in answer.text) == (401, True)


def test_keys_are_found_beside_tokens_whatever_their_form(path: Path, issuer: Issuer) -> None:
    odd = ApiKey(tenant="odd", key="eyJ.a.b")
    keyring = Keyring([odd], {}, logins=Logins(settings_with(jwks_file=str(path))))
    assert keyring.caller(b"Bearer eyJ.a.b").tenant(None, None) == "odd"
    assert keyring.caller(b"bearer  " + issuer.token() + b" ").tenant(None, None) == "research"
    for secret in (b"eyJ.a", b"x.a.b", b"eyJ.a.b.c.d"):
        with pytest.raises(RequestRejected, match="unknown API key"):
            keyring.caller(b"Bearer " + secret)
    with pytest.raises(RequestRejected, match="a token of"):
        keyring.caller(None)
    keyring.close()
    assert isinstance(Keyring((), {}).caller(b"Bearer " + issuer.token()), Caller)
