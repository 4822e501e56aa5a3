"""A scripted login server: it signs tokens, and serves its public keys over HTTP like Keycloak."""

import base64
import contextlib
import json
import ssl
import threading
import time
from collections.abc import Iterator
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from serve_app.serving.tls import TlsSettings

CERTS = "/realms/acme/protocol/openid-connect/certs"
ISSUER = "https://login.example.com/realms/acme"
AUDIENCE = "llm-gateway"


@cache
def private_key(algorithm: str, name: str = "") -> Any:
    """Return the private key of an algorithm; another name is another key."""
    if algorithm == "ES256":
        return ec.generate_private_key(ec.SECP256R1())
    if algorithm == "EdDSA":
        return ed25519.Ed25519PrivateKey.generate()
    return rsa.generate_private_key(public_exponent=65537, key_size=1024 if name == "weak" else 2048)


def public_jwk(kid: str, algorithm: str, key: Any, **fields: Any) -> dict[str, Any]:
    document = jwt.get_algorithm_by_name(algorithm).to_jwk(key.public_key(), as_dict=True)
    return {**document, "kid": kid, "alg": algorithm, "use": "sig", **fields}


def b64(data: bytes | str) -> bytes:
    raw = data.encode() if isinstance(data, str) else data
    return base64.urlsafe_b64encode(raw).rstrip(b"=")


class Issuer:
    """A login server with a signing key for each algorithm; the id of a key is that of its algorithm.

    Attributes:
        keys: algorithm and private key by key id.
        requests: paths that were requested.
        status: status of answers; None closes connections without one.
        body: replaces the answer.
        moved_to: redirects to this URL.
        byte_s: time between two bytes of an answer, in seconds.
    """

    def __init__(self, issuer: str = ISSUER) -> None:
        self.issuer = issuer
        self.keys = {name: (name, private_key(name)) for name in ("RS256", "ES256", "EdDSA")}
        self.requests: list[str] = []
        self.status: int | None = 200
        self.body: bytes | None = None
        self.moved_to = ""
        self.byte_s = 0.0

    def jwks(self) -> bytes:
        listed = [public_jwk(kid, algorithm, key) for kid, (algorithm, key) in self.keys.items()]
        return json.dumps({"keys": listed}).encode()

    def claims(self, **changes: Any) -> dict[str, Any]:
        """Return the claims of a user; None removes one."""
        now = int(time.time())
        claims = {
            "iss": self.issuer,
            "aud": [AUDIENCE, "account"],
            "sub": "f3c1 \u00fc",
            "exp": now + 300,
            "iat": now,
            "department": "research",
            "groups": ["offline_access", "llm-users"],
            **changes,
        }
        return {name: value for name, value in claims.items() if value is not None}

    def token(self, kid: str = "RS256", header: dict[str, Any] | None = None, **changes: Any) -> bytes:
        algorithm, key = self.keys[kid]
        fields = {"kid": kid, **(header or {})}
        return jwt.encode(self.claims(**changes), key, algorithm=algorithm, headers=fields).encode()

    def raw(self, header: str, payload: bytes | None = None, kid: str = "RS256") -> bytes:
        """Return a token with this text as header, and these bytes as payload, with a valid signature."""
        algorithm, key = self.keys[kid]
        body = json.dumps(self.claims()).encode() if payload is None else payload
        signed = b64(header) + b"." + b64(body)
        return signed + b"." + b64(jwt.get_algorithm_by_name(algorithm).sign(signed, key))

    @contextlib.contextmanager
    def serving(self, port: int = 0, tls: TlsSettings | None = None) -> Iterator[int]:
        """Serve the public keys, by HTTPS with this certificate; yield the port."""
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.requests.append(self.path)
                if issuer.status is None:
                    return
                body = issuer.jwks() if issuer.body is None else issuer.body
                self.send_response(302 if issuer.moved_to else issuer.status)
                if issuer.moved_to:
                    self.send_header("location", issuer.moved_to)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                with contextlib.suppress(OSError):
                    for place in range(len(body)) if issuer.byte_s else ():
                        self.wfile.write(body[place : place + 1])
                        time.sleep(issuer.byte_s)
                    if not issuer.byte_s:
                        self.wfile.write(body)

            def log_message(self, *_args: Any) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
            if tls is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(tls.certificate or "", tls.key)
                server.socket = context.wrap_socket(server.socket, server_side=True)
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            thread.start()
            try:
                yield server.server_port
            finally:
                server.shutdown()
                thread.join()
