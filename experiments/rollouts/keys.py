"""API key of all clients, rotated under load with `ewsjf keys`, as operators do it."""

import asyncio
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from experiments.common.errors import ExperimentError

# Gateways read the file every two seconds; a busy machine gets more time.
_KNOWN_AFTER_S = 5.0
_REJECTED_WITHIN_S = 30.0


@dataclass(slots=True)
class RotatedKey:
    """One valid key at a time, except during a rotation.

    Attributes:
        path: of the key file of the gateways.
        secret: current secret of clients; empty while they need none.
        rejected_after_s: time from each old key's revocation to its first rejection.
    """

    path: Path
    secret: str = ""
    rejected_after_s: list[float] = field(default_factory=list)

    def create(self) -> None:
        """Add a key to the file; clients use it from now on."""
        self.secret = self._run("create", "--tenant", "app").strip()

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of a request."""
        return {"authorization": f"Bearer {self.secret}"} if self.secret else {}

    async def rotate(self, http: httpx.AsyncClient) -> None:
        """Add a key, let clients use it once gateways have read it, and revoke the previous one.

        Raises:
            ExperimentError: a gateway still accepts the old one after a while.
        """
        old, before = RotatedKey(self.path, self.secret), self.headers
        fresh = RotatedKey(self.path)
        await asyncio.to_thread(fresh.create)
        await asyncio.sleep(_KNOWN_AFTER_S)
        self.secret = fresh.secret
        await asyncio.to_thread(old.revoke)
        revoked_at = time.monotonic()
        while (await http.get("/v1/models", headers=before)).status_code != 401:
            if time.monotonic() > revoked_at + _REJECTED_WITHIN_S:
                raise ExperimentError(f"a revoked key is taken after {_REJECTED_WITHIN_S:.0f} s")
            await asyncio.sleep(0.1)
        self.rejected_after_s.append(time.monotonic() - revoked_at)

    def revoke(self) -> None:
        """Revoke this key."""
        self._run("revoke", self.secret.split("_")[1])

    def _run(self, *words: str) -> str:
        command = [sys.executable, "-m", "serve_app", "keys", *words, "--file", str(self.path)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ExperimentError(f"keys {words[0]}: {done.stderr.strip()}")
        return done.stdout
