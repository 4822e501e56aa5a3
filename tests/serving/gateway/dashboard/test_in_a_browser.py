"""Dashboard in a browser, over a live scheduler."""

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest

from serve_app.core.events import Arrived
from serve_app.serving.api_keys import read_keys
from tests.browser import BrowserPage, needs_browser
from tests.serving.channel.harness import wait_until
from tests.serving.gateway.batches.test_api import line, run_batch
from tests.serving.gateway.builders import MODEL, Answers, chat, replies

from .harness import KEY, DashboardHarness
from .steps import TABS, choose, live, open_playground, plain, shows, sign_in, text, tile

pytestmark = needs_browser


async def test_it_opens_without_a_key_and_requests_only_its_gateway(
    harness: DashboardHarness, page: BrowserPage
) -> None:
    views = "['tabs', 'panels'].map((id) => document.getElementById(id).checkVisibility())"
    assert await page.evaluate(views) == [False, False]
    await live(page)
    assert await page.evaluate(views) == [True, True]
    assert all(url.startswith(harness.url) for url in page.requests)
    assert KEY not in "".join(page.requests)
    assert await page.evaluate("document.cookie") == ""
    assert await page.evaluate("document.getElementById('door').hidden")
    assert page.problems == []


@pytest.mark.parametrize(
    ("key", "words"), [("sk-guess", "unknown API key"), ("sk-app", "use one with admin: true")]
)
async def test_a_wrong_key_is_reported_and_another_can_be_entered(
    page: BrowserPage, key: str, words: str
) -> None:
    await sign_in(page, key)
    await page.becomes(f"document.getElementById('door-error').textContent.includes({words!r})")
    assert await page.evaluate("document.activeElement.id") == "key"
    assert await page.evaluate("sessionStorage.length") == 0
    await live(page)
    assert await text(page, "#door-error") == ""


async def test_a_link_to_a_receipt_opens_it_after_the_sign_in(
    harness: DashboardHarness, page: BrowserPage
) -> None:
    await page.evaluate("location.hash = '#request/r9'")
    await harness.pause_dispatch()
    harness.submit("r9", tenant="search")
    await wait_until(lambda: harness.fleet.core.find("r9") is not None)
    await live(page)
    assert "search, default" in await shows(page, "request", "r9: waiting")


async def test_nothing_that_an_admin_has_seen_remains_after_the_sign_out(page: BrowserPage) -> None:
    await live(page)
    await choose(page, "keys")
    await shows(page, "keys", "2026-11-26")
    await page.evaluate("document.getElementById('leave').click()")
    # The scripts of the new document have run.
    await page.becomes("document.querySelector('#panels[hidden] [role=tabpanel]') !== null")
    assert "2026-11-26" not in await page.evaluate("document.body.textContent")
    assert await page.evaluate("[sessionStorage.length, document.activeElement.id]") == [0, "key"]
    await live(page)


async def test_what_is_wrong_is_shown_above_all_views_with_the_next_step(
    harness: DashboardHarness, page: BrowserPage
) -> None:
    findings = "document.getElementById('findings').innerText"
    await live(page)
    await page.becomes(f"{findings} === 'No problems found.'")
    await harness.pause_dispatch()
    harness.submit("r1")
    await page.becomes(f"{findings}.includes('accepts requests (1 draining)')")
    assert "DOWN model " in await page.evaluate(findings)
    assert "Next: draining replicas stop" in await page.evaluate(findings)
    harness.resume_dispatch()
    await page.becomes(f"{findings} === 'No problems found.'")
    await harness.fill()
    await page.becomes(f"{findings}.includes('none of its 1 replicas accepts more (1 at the limit)')")
    assert "RISK model " in await page.evaluate(findings)


async def test_it_shows_waiting_requests_with_causes_and_updates_live(
    harness: DashboardHarness, page: BrowserPage
) -> None:
    await live(page)
    assert await page.evaluate(tile("Waiting")) == "0"
    await harness.pause_dispatch()
    for number in range(3):
        harness.submit(f"r{number}", tenant="search")
    await page.becomes(f"{tile('Waiting')} === '3'")
    rows = "[...document.querySelectorAll('#panel-overview tbody tr')]"
    row = f"{rows}.find((row) => row.textContent.startsWith('32-63'))"
    shown_text = await page.becomes(f"{row}.innerText.includes('search') && {row}.innerText")
    assert "default · search" in shown_text
    assert "every replica is" in shown_text
    await choose(page, "queues")
    await shows(page, "queues", "Bars show queued requests")
    drawn = "document.querySelector('#panel-queues svg').textContent"
    assert "32-63 tokens: 3 queued requests" in await page.becomes(drawn)
    harness.resume_dispatch()
    await page.becomes(f"{tile('Waiting')} === '0'")
    await page.becomes(f"{tile('In flight')} === '3'")
    await choose(page, "fleet")
    assert "3" in await page.becomes("document.querySelector('#panel-fleet tbody').innerText")


async def test_the_head_of_a_queue_leads_to_its_receipt(harness: DashboardHarness, page: BrowserPage) -> None:
    await live(page)
    await harness.pause_dispatch()
    harness.submit("r0", tenant="search")
    for tab in ("queues", "overview"):
        await choose(page, tab)
        links = f"[...document.querySelectorAll('#panel-{tab} tbody a')]"
        assert await page.becomes(f"{links}.length && {links}.map((link) => link.hash)") == ["#request/r0"]
    await page.evaluate(f"{links}[0].click()")
    assert "search, default" in await shows(page, "request", "r0: waiting")
    harness.resume_dispatch()


async def test_a_request_that_is_lost_among_many_is_not_rounded_away(
    harness: DashboardHarness, page: BrowserPage
) -> None:
    await live(page)
    await harness.pause_dispatch()
    harness.submit("r0", queue_timeout_s=0.2)
    await page.becomes(f"{tile('Rejected / failed')} === '1 / 0'")
    assert "1 no replica" in await text(page, "#tiles")
    harness.resume_dispatch()
    shown = "import('./dashboard/format.js').then(({ percent }) => [0.9997, 0.996, 0.98, 1, 0].map(percent))"
    assert [plain(each) for each in await page.evaluate(shown)] == [
        "99.9 %",
        "99.6 %",
        "98 %",
        "100 %",
        "0 %",
    ]


async def test_whole_minutes_and_hours_have_no_zeros(page: BrowserPage) -> None:
    shown = "import('./dashboard/format.js').then(({ seconds }) => [119, 600, 605, 7200, 7260].map(seconds))"
    assert [plain(each) for each in await page.evaluate(shown)] == [
        "119 s",
        "10 min",
        "10 min 5 s",
        "2 h",
        "2 h 1 min",
    ]


async def test_outcomes_and_shares_of_tenants_appear_when_requests_end(
    harness: DashboardHarness, page: BrowserPage
) -> None:
    await live(page)
    assert "No request has ended" in await text(page, "#panel-overview")
    async with httpx.AsyncClient(base_url=harness.url, timeout=20) as http:
        for tenant in ("search", "search", "chat"):
            headers = {"authorization": f"Bearer {KEY}", "x-tenant": tenant, "x-priority": "interactive"}
            body: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 3, "stream": True}
            assert (await http.post("/v1/completions", json=body, headers=headers)).status_code == 200
    cell = "document.querySelectorAll('#panel-overview table')[2].querySelector('tbody tr').innerText"
    shown_text = await page.becomes(f"{cell}.startsWith('interactive\\t3') && {cell}")
    assert "100 %" in plain(shown_text)
    assert "ms" in shown_text
    assert await page.evaluate("document.querySelectorAll('#panel-overview svg[role=img]').length") == 2
    slow = "[...document.querySelectorAll('#panel-overview table')[1].querySelectorAll('tbody a')]"
    assert await page.evaluate(f"{slow}.length") == 3
    first = await page.evaluate(f"{slow}[0].innerText")
    await page.evaluate(f"{slow}[0].click()")
    await shows(page, "request", f"{first}: completed")
    await choose(page, "tenants")
    rows = "document.querySelector('#panel-tenants tbody').innerText"
    shown = await page.becomes(f"{rows}.includes('search') && {rows}")
    assert "67 %" in plain(shown)
    assert "33 %" in plain(shown)
    assert "interactive" not in shown
    await page.evaluate("document.querySelector('#panel-tenants .unfold').click()")
    await page.becomes(f"{rows}.includes('interactive')")
    # Totals, of which one shows its parts.
    heads = "[...document.querySelectorAll('#panel-tenants table')[0].querySelectorAll('tbody th')]"
    names = await page.evaluate(f"{heads}.map((head) => head.lastChild.textContent)")
    # The tenants are in the order of their measured engine time.
    assert names in (["search", "interactive", "chat"], ["chat", "interactive", "search"])
    # The contents of the file that the link saves.
    saved = (
        "window.saved = null;"
        "const keep = async (blob) => { window.saved = await blob.text(); };"
        "URL.createObjectURL = (blob) => { keep(blob); return '#'; };"
        "document.querySelector('#panel-tenants .row button').click()"
    )
    await page.evaluate(saved)
    lines = (await page.becomes("window.saved")).splitlines()
    assert lines[0].startswith("model,pool,class,tenant,engine_seconds")
    assert {line.split(",")[3] for line in lines[1:]} == {"search", "chat"}


async def test_batches_show_their_progress(harness: DashboardHarness, page: BrowserPage) -> None:
    await live(page)
    await choose(page, "batches")
    await shows(page, "batches", "There are no batches.")
    client = openai.AsyncOpenAI(base_url=f"{harness.url}/v1", api_key="sk-app", max_retries=0)
    lines = [*map(line, range(7)), line(7, body=chat(model="unknown"))]
    batch = await run_batch(client, lines)
    shown = await shows(page, "batches", f"{batch.id[-14:]}\tapp\tcompleted")
    assert "app completed 100 % 8 1" in " ".join(shown.split())
    await client.close()


async def test_tabs_are_changed_by_keys_and_the_address_names_them(page: BrowserPage) -> None:
    await live(page)
    chosen = "document.querySelector('[aria-selected=true]').id + ' ' + document.activeElement.id"
    await page.evaluate("document.getElementById('tab-overview').focus()")
    for key, tab in (("ArrowRight", "queues"), ("End", "playground"), ("ArrowRight", "overview")):
        await page.press(key)
        await page.becomes(f"{chosen} === 'tab-{tab} tab-{tab}'")
    await page.press("ArrowLeft")
    await page.becomes("location.hash === '#playground'")
    visible = "[...document.querySelectorAll('[role=tabpanel]:not([hidden])')].map((each) => each.id)"
    # The tab of the key before had the same hash until its event was handled.
    await page.becomes(f"{visible}.join() === 'panel-playground'")
    await page.press("Tab")
    assert await page.evaluate("document.activeElement.id") == "panel-playground"


async def test_an_update_leaves_the_focus_and_the_choice_where_they_are(
    harness: DashboardHarness, page: BrowserPage
) -> None:
    await live(page)
    await choose(page, "queues")
    await page.evaluate("document.querySelector('#panel-queues .scroll').focus()")
    was = "document.activeElement === document.querySelector('#panel-queues .scroll')"
    await harness.next_frames()
    assert await page.evaluate(was)


async def test_a_pause_holds_the_figures_still(harness: DashboardHarness, page: BrowserPage) -> None:
    await live(page)
    await page.evaluate("document.getElementById('pause').click()")
    assert await text(page, "#state") == "paused"
    await harness.pause_dispatch()
    harness.submit("r1")
    await harness.next_frames()
    assert await page.evaluate(tile("Waiting")) == "0"
    await page.evaluate("document.getElementById('pause').click()")
    await page.becomes(f"{tile('Waiting')} === '1'")


async def test_a_request_of_the_playground_is_scheduled_as_any_other(
    harness: DashboardHarness, page: BrowserPage
) -> None:
    await open_playground(page)
    await page.evaluate(
        "var form = document.querySelector('#panel-playground form');"
        "form.tokens.value = 120; form.output.value = 5; form.priority.value = 'interactive';"
        "form.requestSubmit()"
    )
    shown_text = await shows(page, "playground", "completed (200)")
    assert "short, s0" in shown_text
    assert "128-255 tokens" in shown_text or "64-127 tokens" in shown_text
    assert "measured in this browser" in shown_text
    assert "7 prompt, 5 output" in shown_text
    assert "w0 w1 w2 w3 w4" in shown_text
    (body,) = [json.loads(each) for each in harness.engine.bodies]
    assert (body["stream"], body["max_tokens"]) == (True, 5)
    assert len(body["messages"][0]["content"].split()) == 120
    await page.evaluate("form.text.value = 'What is a queue?'; form.requestSubmit()")
    await wait_until(lambda: len(harness.engine.bodies) == 2)
    assert json.loads(harness.engine.bodies[1])["messages"] == [
        {"role": "user", "content": "What is a queue?"}
    ]


async def test_keys_are_created_changed_and_revoked(harness: DashboardHarness, page: BrowserPage) -> None:
    await live(page)
    await choose(page, "keys")
    await shows(page, "keys", "The file has no keys yet.")
    usage = "[...document.querySelectorAll('#panel-keys table')[1].querySelectorAll('tbody tr')]"
    shown = await page.evaluate(f"{usage}.map((row) => row.innerText)")
    assert [plain(row).split("\t") for row in shown] == [
        ["2026-11-26", "k1", MODEL, "3", "12k", "0", "900", "\u2013"],
        ["2026-11-25", "k1", MODEL, "2", "50", "0", "7", "\u2013"],
    ]
    form = "var form = document.querySelector('#panel-keys form');"
    await page.evaluate(
        f"{form} form.tenant.value = 'app'; form.cost_per_day.value = '2.5'; form.models.value = ' {MODEL} ';"
        "form.requestSubmit()"
    )
    secret = await page.becomes("document.querySelector('#panel-keys .secret')?.innerText")
    (kept,) = read_keys(harness.keys)
    assert (kept.tenant, kept.cost_per_day, kept.models) == ("app", 2.5, (MODEL,))
    assert secret.startswith(f"ewsjf_{kept.id}_")
    await shows(page, "keys", "per day")
    await page.evaluate(
        "document.querySelector('#panel-keys .secret').parentElement.querySelector('button').click()"
    )
    await page.becomes(f"!document.getElementById('panel-keys').innerText.includes({secret!r})")

    await page.evaluate(f"document.querySelector('[aria-label=\"Change key {kept.id}\"]').click()")
    assert await page.evaluate(f"{form} form.cost_per_day.value") == "2.5"
    changed = "form.cost_per_day.value = ''; form.tokens_per_day.value = '900'; form.requestSubmit()"
    await page.evaluate(f"{form} {changed}")
    await shows(page, "keys", "900 tokens per day")
    (kept,) = read_keys(harness.keys)
    assert (kept.cost_per_day, kept.tokens_per_day, kept.models) == (None, 900, (MODEL,))

    await page.evaluate("window.confirm = () => true")
    await page.evaluate(f"document.querySelector('[aria-label=\"Revoke key {kept.id}\"]').click()")
    await shows(page, "keys", "revoked")
    assert read_keys(harness.keys)[0].status() == "revoked"
    await page.evaluate(f"{form} form.tenant.value = 'two words'; form.requestSubmit()")
    await shows(page, "keys", "tenant must be a short printable name")


async def test_a_request_that_waited_has_a_receipt(harness: DashboardHarness, page: BrowserPage) -> None:
    await open_playground(page)
    await harness.pause_dispatch()
    arrivals = harness.fleet.control_plane.events(Arrived)
    await page.evaluate("document.querySelector('#panel-playground form').requestSubmit()")
    await shows(page, "playground", "1 request")
    own = arrivals[0].request.request_id
    await page.evaluate(f"location.hash = '#request/{own}'")
    shown_text = await shows(page, "request", "waiting")
    assert "1 of 1 in pool short" in shown_text
    assert "the replicas did not report or were draining" in shown_text
    await page.evaluate("location.hash = '#playground'")
    harness.resume_dispatch()
    await shows(page, "playground", "completed (200)")

    await page.evaluate("document.querySelector('#panel-playground a[href^=\"#request/\"]').click()")
    shown_text = await shows(page, "request", "completed")
    assert "the replicas did not report or were draining" in shown_text
    assert "until the first token" in shown_text
    assert "of which: prefill (estimated)" in shown_text
    assert "generation" in shown_text
    await page.evaluate("location.hash = '#request/unknown'")
    await shows(page, "request", "ten minutes")


async def test_the_playground_shows_why_a_request_was_rejected_and_cancels_one_that_waits(
    harness: DashboardHarness, page: BrowserPage
) -> None:
    await open_playground(page)
    form = "document.querySelector('#panel-playground form')"
    harness.engine.answers.append(replies(400, {"error": {"message": "no such thing", "code": 400}}))
    await page.evaluate(f"{form}.stream.checked = false; {form}.requestSubmit()")
    assert "rejected (400)" in await shows(page, "playground", "no such thing")
    await harness.pause_dispatch()
    await page.evaluate(f"{form}.requestSubmit()")
    await shows(page, "playground", "1 request")
    await page.evaluate(f"{form}.stop.click()")
    await shows(page, "playground", "cancelled by the user")
    await page.becomes(f"{tile('Waiting')} === '0'")


async def test_a_replaced_scheduler_is_shown_and_the_figures_continue(
    harness: DashboardHarness, page: BrowserPage
) -> None:
    await live(page)
    await harness.pause_dispatch()
    harness.submit("r1")
    await page.becomes(f"{tile('Waiting')} === '1'")
    harness.fleet.control_plane.kill()
    notice = "document.querySelector('#panel-overview .notice')"
    shown_text = await page.becomes(f"{notice} && {notice}.innerText")
    assert "its scheduler does not respond" in shown_text
    assert "Data shown is from" in shown_text
    assert await page.evaluate(tile("Waiting")) == "1"
    await harness.fleet.control_plane.begin()
    await page.becomes(f"!{notice} && {tile('Waiting')} === '1'")
    assert await text(page, "#state") == "live"


async def test_a_lost_gateway_is_shown_and_a_returning_one_is_watched_again(
    harness: DashboardHarness, page: BrowserPage
) -> None:
    await live(page)
    harness.relay.rejects = True
    harness.relay.cut()
    await page.becomes("document.getElementById('state').textContent.includes('retrying in')")
    assert not await page.evaluate("document.getElementById('tiles').hidden")
    harness.relay.rejects = False
    await page.becomes("document.getElementById('state').textContent === 'live'")


async def test_names_that_tenants_give_themselves_stay_text(
    harness: DashboardHarness, page: BrowserPage
) -> None:
    await live(page)
    await harness.pause_dispatch()
    name = "<img/src=x/onerror=document.title='owned'>"
    harness.submit("r1", tenant=name)
    harness.submit("r2", tenant="</td><script>alert(1)</script>")
    await shows(page, "overview", "<img/src=x")
    for tab in TABS:
        await choose(page, tab)
        await asyncio.sleep(0.1)
    assert await page.evaluate("document.querySelectorAll('main img, main script').length") == 0
    assert await page.evaluate("document.title") == "ewsjf-serve"
    assert page.problems == []


async def test_one_of_several_models_is_chosen(harness: DashboardHarness, page: BrowserPage) -> None:
    async def other() -> dict[str, Any]:
        raise ConnectionError("gone")

    harness.queries["other"] = Answers(overview=other)
    await live(page)
    choice = "document.getElementById('model')"
    assert await page.evaluate(f"[...{choice}.options].map((each) => each.value)") == [MODEL, "other"]
    await page.evaluate(f"{choice}.value = 'other'; {choice}.dispatchEvent(new Event('change'))")
    assert "other: its scheduler does not respond" in await text(page, "#panel-overview .notice")
    assert await page.evaluate("document.getElementById('tiles').hidden")
    await page.evaluate(f"{choice}.value = {MODEL!r}; {choice}.dispatchEvent(new Event('change'))")
    await page.becomes("!document.getElementById('tiles').hidden")
