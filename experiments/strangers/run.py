"""Servers that expose nothing: is the scheduler ever worse than no scheduler?

Scripted servers (`servers`) have a hidden number of slots, or none, and first tokens that vary more or less.
Four variants get the same requests at the same times: a client that alternates between the servers, one that
sends to the server with the fewest requests in flight, the scheduler, and the scheduler with the limit
configured.

Load 1.0 is what the servers can serve. Without slots there is no such limit, and it is `unlimited_per_s` for
each server.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from experiments.common.config import as_json
from experiments.common.experiment import Cell, Context, Experiment, Measurement, play_cells
from experiments.common.provenance import generated
from experiments.strangers.servers import POOL, Direct, Job, Scheduled, ServerSettings
from serve_app.core.routing.pools import RoutingSettings
from serve_app.core.settings_base import settings
from serve_app.lab.simulation.run import MODEL, scheduler_settings
from serve_app.request import PromptShape, Request, RequestSpec, Submission

ALTERNATE, LEAST, OURS, CONFIGURED = "alternate", "least in flight", "ours", "configured"
VARIANTS = (ALTERNATE, LEAST, OURS, CONFIGURED)
# Requests before the scheduler can have learned, and the fewest of them.
COLD_S, COLD_REQUESTS = 30.0, 200
SHORT_TOKENS = 256
# Configured limit of servers without one.
_NO_LIMIT = 1 << 20


@settings
class Case:
    """Servers and requests of one case.

    Attributes:
        slowness: of each server.
        streamed: whether answers are streamed.
        usage: whether servers count tokens.
    """

    server: ServerSettings = field(default_factory=ServerSettings)
    slowness: tuple[float, ...] = (1.0, 1.0)
    streamed: bool = True
    usage: bool = True


@settings
class StrangersSettings:
    """Settings of the experiment.

    Attributes:
        seconds: length of the arrivals, at least.
        least_requests: number of requests, at least.
        unlimited_per_s: rate of load 1.0 for each server without a limit.
        output_tokens: mean of the answers.
    """

    cases: Mapping[str, Case]
    loads: tuple[float, ...]
    seeds: tuple[int, ...]
    variants: tuple[str, ...] = VARIANTS
    seconds: float = 120.0
    least_requests: int = 1_000
    unlimited_per_s: float = 14.0
    output_tokens: float = 100.0


@dataclass(frozen=True, slots=True)
class Run:
    """One variant of a case at one load with one seed."""

    settings: StrangersSettings
    case: Case
    load: float
    variant: str
    seed: int

    @property
    def rate_per_s(self) -> float:
        """Rate of the arrivals."""
        server, tokens = self.case.server, self.settings.output_tokens
        per_s = 0.0
        for slowness in self.case.slowness:
            limits = [self.settings.unlimited_per_s / slowness]
            if (slots := server.slots or server.concurrent) is not None:
                limits.append(slots / (slowness * server.service_s(tokens, slots - 1)))
            if server.tokens_per_minute is not None:
                # The mean of the prompts is about 950 tokens.
                limits.append(server.tokens_per_minute / 60 / (950 + tokens))
            per_s += limits[-1]
        return self.load * per_s

    def jobs(self) -> list[Job]:
        """Return the requests: four of five have short prompts, and one tenant sends seven of ten."""
        rng = random.Random(self.seed)  # noqa: S311 - no secret
        count = max(self.settings.least_requests, round(self.settings.seconds * self.rate_per_s))
        at, jobs = 0.0, []
        for number in range(count):
            at += rng.expovariate(self.rate_per_s)
            prompt_tokens = rng.randint(64, 256) if rng.random() < 0.8 else rng.randint(2_000, 6_000)
            spec = RequestSpec(
                model=MODEL,
                shape=PromptShape(text_bytes=4 * prompt_tokens),
                streamed=self.case.streamed,
            )
            tenant = "heavy" if rng.random() < 0.7 else f"light{rng.randrange(10)}"
            submission = Submission(request_id=f"r{number}", spec=spec, tenant=tenant)
            output_tokens = max(1, round(rng.gammavariate(2.0, self.settings.output_tokens / 2)))
            request = Request(submission=submission, gateway_id="g1", arrived_at=at)
            jobs.append(Job(request, prompt_tokens, output_tokens, rng.getrandbits(32)))
        return jobs


Figures = Mapping[str, float]


def play_run(run: Run) -> Figures:
    """Play a run."""
    jobs = run.jobs()
    server, slowness = run.case.server, run.case.slowness
    driver: Direct | Scheduled
    if run.variant in (ALTERNATE, LEAST):
        driver = Direct(jobs, server, slowness, run.variant == LEAST)
    else:
        routing = RoutingSettings(pools=(POOL,))
        limit = (server.slots or server.concurrent or _NO_LIMIT) if run.variant == CONFIGURED else None
        driver = Scheduled(
            jobs, server, slowness, scheduler_settings("ewsjf", routing, {}), limit, run.case.usage
        )
    driver.run()
    most = max(each.most_at_once for each in driver.servers.values())
    return figures(jobs, most, counts_prompts=server.tokens_per_minute is not None)


def figures(jobs: Sequence[Job], most_at_once: int, *, counts_prompts: bool) -> Figures:
    """Return the figures of played requests: first tokens count from arrival, in seconds.

    All but `cold` are of requests after the start. `done_tokens` are output tokens of the requests completed
    until the last one arrived, and prompt tokens if the servers limit them.
    """
    cold = [job for job in jobs if job.request.arrived_at < COLD_S]
    warm = jobs[max(len(cold), COLD_REQUESTS) :]
    groups = {
        "": warm,
        "short_": [job for job in warm if job.prompt_tokens <= SHORT_TOKENS],
        "light_": [job for job in warm if job.request.tenant != "heavy"],
        "cold_": cold,
    }
    found: dict[str, float] = {}
    for name, group in groups.items():
        found[f"{name}mean_s"], found[f"{name}p99_s"] = _mean_and_p99(group)
    last_at = jobs[-1].request.arrived_at
    return found | {
        "done_tokens": sum(
            job.output_tokens + (job.prompt_tokens if counts_prompts else 0)
            for job in jobs
            if job.finished_at is not None and job.finished_at <= last_at
        ),
        "completed": sum(job.finished_at is not None for job in jobs),
        "most_at_once": most_at_once,
    }


def _mean_and_p99(jobs: Sequence[Job]) -> tuple[float, float]:
    """Return mean and P99 of the first tokens."""
    seconds = sorted(each for job in jobs if (each := job.ttft_s) is not None)
    if not seconds:
        return 0.0, 0.0
    return sum(seconds) / len(seconds), seconds[int(0.99 * len(seconds))]


def play(settings: StrangersSettings, context: Context) -> Iterator[Measurement]:
    """Measure every variant of every case at every load."""
    cells = [
        Cell(
            key={"case": name, "load": load, "variant": variant},
            runs=[Run(settings, case, load, variant, seed) for seed in settings.seeds],
            seeds=settings.seeds,
            traces=generated("short and long"),
            settings=as_json(replace(settings, cases={name: case})),
        )
        for name, case in settings.cases.items()
        for load in settings.loads
        for variant in settings.variants
    ]
    return play_cells("strangers", cells, play_run, context)


EXPERIMENT = Experiment(settings=StrangersSettings, play=play)
