"""CPU time of authentication in a gateway: an API key, and a token when it is new and once it is cached.

The token has 1 kB, as those of login servers have, and is signed with RS256 by a key of 2,048 bits. Prints
the medians of the rounds. Nothing else of a request is included.

    python -m experiments.overhead.logins
"""

import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa

from serve_app.serving.api_keys import create_key
from serve_app.serving.gateway.keys import Keyring
from serve_app.serving.gateway.logins import Logins
from serve_app.serving.gateway.settings import JwtSettings, LoginGroup

ISSUER, AUDIENCE = "https://login.example.com/realms/acme", "llm-gateway"
ROUNDS, CALLS = 21, 100
# Characters of further claims that make a token of 1 kB.
_FILLING = "x" * 310


def main() -> None:
    """Measure and print."""
    private = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    tokens = [_token(private, number) for number in range(ROUNDS * CALLS)]
    with tempfile.TemporaryDirectory() as folder:
        certs, keys = Path(folder) / "certs.json", Path(folder) / "keys.json"
        public = jwt.algorithms.RSAAlgorithm.to_jwk(private.public_key(), as_dict=True)
        certs.write_text(json.dumps({"keys": [{**public, "kid": "a"}]}))
        _, secret = create_key(keys, tenant="a")
        groups = (LoginGroup(name="llm-users"),)
        settings = JwtSettings(
            issuer=ISSUER,
            audience=AUDIENCE,
            tenant_claim="department",
            groups=groups,
            jwks_file=str(certs),
        )
        keyring = Keyring((), {}, keys, logins=Logins(settings))
        time.sleep(0.5)  # until its threads have read the files
        print(f"{len(tokens[0])} bytes of a token, medians of {ROUNDS} rounds in µs of CPU time:")
        print(f"  API key       {_microseconds(keyring, [secret.encode()] * len(tokens)):7.1f}")
        print(f"  new token     {_microseconds(keyring, tokens):7.1f}")
        print(f"  cached token  {_microseconds(keyring, tokens):7.1f}")
        keyring.close()


def _token(private: rsa.RSAPrivateKey, number: int) -> bytes:
    claims = {
        "iss": ISSUER,
        "aud": AUDIENCE,
        "exp": int(time.time()) + 3600,
        "jti": f"{number:08}",
        "department": "research",
        "groups": ["llm-users"],
        "name": _FILLING,
    }
    return jwt.encode(claims, private, "RS256", headers={"kid": "a"}).encode()


def _microseconds(keyring: Keyring, secrets: Sequence[bytes]) -> float:
    """Return the median CPU time of authenticating with one of these secrets."""
    headers = [b"Bearer " + secret for secret in secrets]
    rounds = []
    for start in range(0, len(headers), CALLS):
        began = time.thread_time()
        for header in headers[start : start + CALLS]:
            keyring.caller(header)
        rounds.append((time.thread_time() - began) / CALLS * 1e6)
    return statistics.median(rounds)


if __name__ == "__main__":
    main()
