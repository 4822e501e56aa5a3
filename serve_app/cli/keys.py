"""Command `keys`: creates, lists and revokes API keys, and prints their usage."""

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from serve_app.cli.application import ApplicationClient, add_address
from serve_app.cli.command import add_number, positive_float, positive_int, print_result, warn
from serve_app.cli.serve.instance import running_instances
from serve_app.errors import SettingsError
from serve_app.lab.tables import documents_table, table_text
from serve_app.request import PriorityClass
from serve_app.serving.api_keys import KeyRecord, create_key, read_keys, revoke_key
from serve_app.settings.application import load_settings

# -- usage per key, as counted by the schedulers of a running application ------------------------------------


COLUMNS = ("day", "key", "model", "requests", "prompt_tokens", "cached_tokens", "generated_tokens", "cost")


def show_usage(args: argparse.Namespace) -> int:
    """Print the usage ledgers of an application. The exit status is 1 if a scheduler did not answer.

    Raises:
        ApplicationError: the application does not answer, or rejects the query.
    """
    models = ApplicationClient(args).models("/debug/usage")
    for model in models:
        if "error" in model:
            warn(f"{model['model']}: {model['error']}")
    rows = [row for model in models for row in model.get("rows", ())]
    rows = sorted((row for row in rows if row["day"] >= (args.since or "")), key=_order)
    if args.json:
        print_result(json.dumps(rows, indent=1))
    elif args.csv:
        writer = csv.DictWriter(sys.stdout, COLUMNS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        print_result(_table(rows))
    return 1 if any("error" in model for model in models) else 0


def _order(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["day"], row["key"], row["model"]


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "no request with a key has completed yet"
    lines = [tuple(_cell(row.get(column)) for column in COLUMNS) for row in rows]
    return table_text([column.replace("_", " ") for column in COLUMNS], lines, text_columns=3)


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4f}"
    return f"{value:,}" if isinstance(value, int) else str("" if value is None else value)


# -- command -----------------------------------------------------------------------------------------------


_ACTIONS = ("create", "list", "revoke", "usage")
# Parser and help of each limit.
_LIMITS = {
    "requests_per_minute": (positive_int, "requests admitted in any 60 s, per model"),
    "tokens_per_minute": (positive_int, "tokens admitted in any 60 s, per model"),
    "concurrent": (positive_int, "requests queued or in flight, per model"),
    "queued": (positive_int, "requests queued, per model"),
    "tokens_per_day": (positive_int, "tokens in a UTC day, over all models"),
    "tokens_per_month": (positive_int, "tokens in a UTC month, over all models"),
    "cost_per_day": (positive_float, "cost in a UTC day, at the prices of `models[].price`"),
    "cost_per_month": (positive_float, "cost in a UTC month, at the same prices"),
}
_TARGETS = {
    "ttft_target_s": "seconds to the first token",
    "tpot_target_s": "seconds per output token after the first",
}


EXAMPLE = (
    "example:\n"
    "  ewsjf keys create --file /etc/ewsjf/keys.json --tenant app --requests-per-minute 600\n"
    "  ewsjf keys list --file /etc/ewsjf/keys.json\n"
    "  ewsjf keys revoke 3f9a2c17b0de --file /etc/ewsjf/keys.json\n"
    "  ewsjf keys usage --csv --since 2026-01-01"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("action", choices=_ACTIONS, help="create, list, revoke or usage")
    parser.add_argument("id", nargs="?", help="id of the key to revoke")
    place = parser.add_mutually_exclusive_group()
    place.add_argument(
        "--file", type=Path, help="file of keys (default: the configuration's gateway.keys_file)"
    )
    place.add_argument(
        "--config",
        type=Path,
        help="configuration with gateway.keys_file (default: that of the running application)",
    )
    parser.add_argument("--json", action="store_true", help="print the list or the usage as JSON")
    _add_permissions(parser.add_argument_group("permissions of a new key"))
    usage = parser.add_argument_group("usage", "from the ledger of a running application")
    usage.add_argument("--csv", action="store_true", help="print the usage as CSV")
    usage.add_argument(
        "--since", metavar="DAY", type=_day, help="first day in UTC, such as 2026-01-31 (default: all)"
    )
    add_address(parser)


def _add_permissions(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--tenant", help="tenant of the key; required to create one")
    group.add_argument("--name", default="", help="description")
    add_number(group, "--weight", "weight of the tenant in fair sharing")
    add_number(group, "--floor-tokens-per-s", "service that the tenant gets before others while it waits")
    group.add_argument(
        "--highest-class",
        choices=[each.value for each in PriorityClass],
        default=PriorityClass.INTERACTIVE.value,
        help="highest priority class of its requests (default: %(default)s)",
    )
    group.add_argument(
        "--model", action="append", default=[], help="model that it may use; may be repeated (default: all)"
    )
    for limit, (kind, text) in _LIMITS.items():
        add_number(group, f"--{limit.replace('_', '-')}", f"limit of {text} (default: no limit)", kind=kind)
    for target, text in _TARGETS.items():
        stated = f"latency target of requests that state none: {text} (default: that of their class)"
        add_number(group, f"--{target.replace('_', '-')}", stated)
    group.add_argument(
        "--refuse-missed",
        action="store_true",
        help="reject requests on arrival that are expected to miss their latency target",
    )
    add_number(group, "--expires-in-days", "lifetime in days (default: unlimited)", metavar="DAYS")
    group.add_argument("--admin", action="store_true", help="may use the debug and admin endpoints")
    group.add_argument(
        "--may-act-for-tenants",
        action="store_true",
        help="may send requests for other tenants, named by `x-tenant`",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command and return its exit status."""
    if args.action == "usage":
        return show_usage(args)
    path = _path(args)
    if args.action == "list":
        return _list(read_keys(path), as_json=bool(args.json))
    if args.action == "create":
        return _create(path, args)
    return _revoke(path, args.id)


def _path(args: argparse.Namespace) -> Path:
    """Return the key file that the arguments select.

    Raises:
        SettingsError: the arguments select none.
    """
    if args.file is not None:
        return Path(args.file)
    running = {Path(each.config) for each in running_instances() if args.url in (None, each.url)}
    configs = [args.config] if args.config else sorted(running)
    if len(configs) != 1:
        found = "several applications run here" if configs else "no such application runs here"
        raise SettingsError(f"pass --file with the file of keys, --config, or --url: {found}")
    found_path = load_settings(configs[0]).gateway.keys_file
    if found_path is None:
        raise SettingsError(f"{configs[0]} has no gateway.keys_file: add it, or pass --file")
    return Path(found_path)


def _create(path: Path, args: argparse.Namespace) -> int:
    if not args.tenant:
        raise SettingsError("a key belongs to a tenant: pass --tenant")
    days = args.expires_in_days
    try:
        expires_at = None if days is None else datetime.now(UTC).replace(microsecond=0) + timedelta(days=days)
    except OverflowError as exc:
        raise SettingsError(f"--expires-in-days must end before the year 10000, got {days:g}") from exc
    record, secret = create_key(
        path,
        tenant=args.tenant,
        name=args.name,
        weight=args.weight,
        floor_tokens_per_s=args.floor_tokens_per_s,
        highest_class=args.highest_class,
        models=tuple(args.model),
        expires_at=expires_at,
        admin=args.admin,
        may_act_for_tenants=args.may_act_for_tenants,
        refuse_missed=args.refuse_missed,
        **{limit: getattr(args, limit) for limit in (*_LIMITS, *_TARGETS)},
    )
    warn(f"key {record.id} of tenant {record.tenant} is in {path}; its secret is shown only now:")
    print_result(secret)
    return 0


def _revoke(path: Path, key_id: str | None) -> int:
    if not key_id:
        raise SettingsError("pass the id of the key to revoke; `keys list` shows it")
    revoke_key(path, key_id)
    print_result(f"key {key_id} is revoked; gateways reject it within seconds")
    return 0


def _list(keys: Sequence[KeyRecord], *, as_json: bool) -> int:
    if as_json:
        print_result(json.dumps([key.shown() for key in keys], indent=1))
        return 0
    rows = [
        {
            **msgspec.structs.asdict(key),
            "status": key.status(),
            "highest_class": key.highest_class.value,
            "weight": "" if key.weight is None else f"{key.weight:g}",
            "floor": "" if key.floor_tokens_per_s is None else f"{key.floor_tokens_per_s:,.0f}",
            "models": ", ".join(key.models) or "all",
            "limits": ", ".join(f"{limit}={value}" for limit in _LIMITS if (value := getattr(key, limit))),
            "expires": key.expires_at.date().isoformat() if key.expires_at else "",
            "may": ", ".join(word for word in ("admin", "may_act_for_tenants") if getattr(key, word)),
        }
        for key in keys
    ]
    print_result(documents_table(_KEYS, rows, text_columns=11))
    return 0


_KEYS = (
    "id: {id} | tenant: {tenant} | name: {name} | status: {status} | weight: {weight} | "
    "floor, tokens/s: {floor} | highest class: {highest_class} | "
    "models: {models} | limits: {limits} | expires: {expires} | may: {may}"
)


def _day(text: str) -> str:
    try:
        return datetime.strptime(text, "%Y-%m-%d").replace(tzinfo=UTC).date().isoformat()
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a day such as 2026-01-31, got {text!r}") from None
