"""Secrets of API keys: `ewsjf_ID_RANDOM`, found by their id and compared by a salted hash.

The id is not secret: it finds the record, and names the key in lists, limits and the ledger of usage. The
rest is 256 bits of chance. Nobody tries so many, so one round of a fast hash is enough: the slow hashes of
passwords defend words that people think of, and would cost a gateway more per request than all else that it
does. The salt keeps two files from showing that they hold one secret.
"""

import hashlib
import hmac
import secrets

PREFIX = "ewsjf"
_RANDOM_BYTES = 32
_ID_BYTES = 6
_SALT_BYTES = 16
_DIGEST_BYTES = 32


def new_secret() -> tuple[str, str]:
    """A new id, and the secret that contains it."""
    key_id = secrets.token_hex(_ID_BYTES)
    return key_id, f"{PREFIX}_{key_id}_{secrets.token_urlsafe(_RANDOM_BYTES)}"


def id_of(secret: bytes) -> str | None:
    """The id in a secret; None when it has not the shape of one of ours."""
    prefix, _, rest = secret.partition(b"_")
    key_id, separator, _ = rest.partition(b"_")
    if prefix != PREFIX.encode() or not separator:
        return None
    return key_id.decode("latin-1")


def hashed(secret: str) -> str:
    """The salted hash of a secret, as files have it."""
    salt = secrets.token_bytes(_SALT_BYTES)
    return f"blake2b:{salt.hex()}:{_digest(secret.encode(), salt).hex()}"


def parsed_hash(text: str) -> tuple[bytes, bytes]:
    """Salt and digest of a hash in a file.

    Raises:
        ValueError: it is none.
    """
    kind, _, rest = text.partition(":")
    salt, _, digest = rest.partition(":")
    found = bytes.fromhex(salt), bytes.fromhex(digest)
    if kind != "blake2b" or len(found[0]) != _SALT_BYTES or len(found[1]) != _DIGEST_BYTES:
        raise ValueError("a hash has the form blake2b:SALT:DIGEST, 16 and 32 bytes in hexadecimal digits")
    return found


def is_secret_of(secret: bytes, salt: bytes, digest: bytes) -> bool:
    """Whether a secret has this hash; the time that it takes tells nothing of the digest."""
    return hmac.compare_digest(_digest(secret, salt), digest)


def _digest(secret: bytes, salt: bytes) -> bytes:
    return hashlib.blake2b(secret, digest_size=_DIGEST_BYTES, salt=salt).digest()
