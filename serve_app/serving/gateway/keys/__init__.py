"""Who may call a gateway: keys in the configuration, keys in a file, and what each of them allows.

Read `caller.py`, what is known of whoever calls, then `keyring.py`, how that is found. `settings.py` has the
keys of a configuration, `file_keys.py` those of a file.
"""
