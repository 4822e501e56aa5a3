"""API keys in a file: secrets that are shown once, salted hashes that are kept, and what each key allows.

Read `secret.py`, then `record.py`, then `file.py`. Gateways read such files, and `python -m serve_app keys`
writes them.
"""

from serve_app.api_keys.file import KeysFileError, changed_keys, read_keys
from serve_app.api_keys.record import KeyRecord
from serve_app.api_keys.secret import new_secret

__all__ = ["KeyRecord", "KeysFileError", "changed_keys", "new_secret", "read_keys"]
