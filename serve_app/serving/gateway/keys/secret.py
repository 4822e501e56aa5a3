"""A secret in the settings: given itself, in an environment variable, or in a file."""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from serve_app.errors import SettingsError


class SecretPlaces(Protocol):
    """The three ways to give a secret, of which exactly one is used."""

    @property
    def key(self) -> str | None:
        """The secret itself."""

    @property
    def env(self) -> str | None:
        """Name of the environment variable that holds it."""

    @property
    def file(self) -> str | None:
        """Path of the file that holds it."""


def check_one_place(places: SecretPlaces, name: str) -> None:
    """Check that the secret is given once.

    Args:
        name: of the secret, as a message begins.

    Raises:
        SettingsError: it is given in none of the ways, or in several.
    """
    given = [place for place in ("key", "env", "file") if getattr(places, place)]
    if len(given) != 1:
        raise SettingsError(
            f"{name} needs exactly one of key, env, file; got {' and '.join(given) or 'none'}"
        )


def read_secret(places: SecretPlaces, name: str, environment: Mapping[str, str]) -> str:
    """The secret, from wherever it is kept.

    Raises:
        SettingsError: the environment variable or file is missing or empty.
    """
    if places.key:
        return places.key
    if places.env:
        found, place = environment.get(places.env, ""), f"environment variable {places.env}"
    else:
        path = places.file or ""
        place = f"file {path}"
        try:
            found = Path(path).read_text(encoding="utf-8")
        except OSError as exc:
            raise SettingsError(f"{name} cannot be read from {path}: {exc.strerror}") from exc
    if not found.strip():
        raise SettingsError(f"{name} is empty: put it into {place}")
    return found.strip()
