import csv
import io

from serve_app.serving.gateway.admin import cost_table
from tests.serving.gateway.builders import Answers, admin_client


def row(tenant: str, gpu_seconds: float | None = 8.0) -> dict[str, object]:
    return {
        "pool": "short",
        "class": "batch",
        "tenant": tenant,
        "engine_seconds": 2.0004,
        "gpu_seconds": gpu_seconds,
        "share": 1.0,
        "imposed_delay_seconds": 0.25,
    }


def costs(*rows: dict[str, object], model: str = "m") -> dict[str, object]:
    return {"model": model, "since": 1_700_000_000.0, "rows": list(rows)}


def test_each_row_is_a_line_below_the_heading() -> None:
    lines = list(csv.reader(io.StringIO(cost_table([costs(row("a"), row("b", None))]))))

    assert lines == [
        [
            "model",
            "pool",
            "class",
            "tenant",
            "engine_seconds",
            "gpu_seconds",
            "imposed_delay_seconds",
            "since",
        ],
        ["m", "short", "batch", "a", "2.000", "8.000", "0.250", "2023-11-14T22:13:20Z"],
        ["m", "short", "batch", "b", "2.000", "", "0.250", "2023-11-14T22:13:20Z"],
    ]


def test_a_tenant_s_name_is_no_formula_and_stays_in_its_cell() -> None:
    names = ["=HYPERLINK(A1)", "+1", "-1", "@x", "a,b", 'a"b', "a\nb"]
    lines = list(csv.reader(io.StringIO(cost_table([costs(*map(row, names))]))))

    assert [line[3] for line in lines[1:]] == [
        "'=HYPERLINK(A1)",
        "'+1",
        "'-1",
        "'@x",
        "a,b",
        'a"b',
        "a\nb",
    ]


async def test_the_table_is_whole_or_rejected() -> None:
    async def counted() -> dict[str, object]:
        return costs(row("me"), model="a")

    async def silent() -> dict[str, object]:
        raise ConnectionError("gone")

    good, bad = Answers(costs=counted), Answers(costs=silent)
    for views, expected in (({"a": good}, 200), ({"a": good, "b": bad}, 503)):
        async with admin_client(views) as http:
            answer = await http.get("/debug/costs.csv")
            as_json = await http.get("/debug/costs")
        assert answer.status_code == expected
        assert as_json.json()["models"][0] == costs(row("me"), model="a")
        if expected == 200:
            assert answer.headers["content-type"].startswith("text/csv")
            assert answer.text == cost_table([costs(row("me"), model="a")])
        else:
            assert "b: its scheduler does not respond" in answer.json()["error"]["message"]


def test_a_scheduler_of_an_older_release_has_no_start_of_counting() -> None:
    older = costs(row("a"))
    del older["since"]
    assert list(csv.reader(io.StringIO(cost_table([older]))))[1][-1] == ""
