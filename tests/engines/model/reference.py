"""Reference engine model: a loop over all sequences per step, without a prefix cache.

It is slow and obvious; the fast model is compared with it.
"""

from dataclasses import dataclass, field

from serve_app.engines.model import EngineModelSettings, SchedulingPolicy


@dataclass(eq=False)
class PlainSequence:
    name: str
    prompt: int
    target: int
    priority: int
    number: int
    arrived_at: float = 0.0
    computed: int = 0
    outputs: int = 0
    blocks: int = 0


@dataclass
class PlainStep:
    tokens: dict[str, int] = field(default_factory=dict)
    preempted: list[str] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)


class PlainEngine:
    def __init__(self, settings: EngineModelSettings) -> None:
        self.settings = settings
        self.free = settings.kv_blocks
        self.waiting: list[PlainSequence] = []
        self.running: list[PlainSequence] = []

    def add(self, sequence: PlainSequence) -> None:
        self.waiting.append(sequence)
        self._sort()

    def abort(self, name: str) -> None:
        for group in (self.waiting, self.running):
            for sequence in [each for each in group if each.name == name]:
                group.remove(sequence)
                self.free += sequence.blocks

    def step(self) -> PlainStep:
        step = PlainStep()
        budget = self.settings.max_num_batched_tokens
        limit = self.settings.long_prefill_token_threshold
        if not limit or len(self.running) + len(self.waiting) <= 1:
            limit = budget
        taken: dict[PlainSequence, tuple[int, int]] = {}
        index = 0
        while index < len(self.running) and budget:
            sequence = self.running[index]
            tokens = min(sequence.prompt + sequence.outputs - sequence.computed, limit, budget)
            blocks = self._blocks(sequence.computed + tokens) - sequence.blocks
            while blocks > self.free:
                victim = self.running[-1]
                if self.settings.scheduling_policy is SchedulingPolicy.PRIORITY:
                    victim = max(self.running, key=lambda each: (each.priority, each.arrived_at))
                given = taken.pop(victim, (0, 0))
                budget += given[0]
                index -= self.running.index(victim) < index
                self.running.remove(victim)
                self.free += victim.blocks
                victim.blocks = victim.computed = 0
                step.preempted.append(victim.name)
                self.waiting.insert(0, victim)
                if victim is sequence:
                    break
            if sequence not in self.running:
                break
            self._take(sequence, tokens, blocks, taken)
            budget -= tokens
            index += 1
        while (
            not step.preempted and budget and self.waiting and len(self.running) < self.settings.max_num_seqs
        ):
            sequence = self.waiting[0]
            known = sequence.prompt + sequence.outputs
            tokens = min(known, limit, budget)
            if self._blocks(known if self.settings.full_prompt_must_fit else tokens) > self.free:
                break
            self.running.append(self.waiting.pop(0))
            self._take(sequence, tokens, self._blocks(tokens), taken)
            budget -= tokens
        self._sort()
        self._generate(step, taken)
        return step

    def _take(
        self,
        sequence: PlainSequence,
        tokens: int,
        blocks: int,
        taken: dict[PlainSequence, tuple[int, int]],
    ) -> None:
        self.free -= blocks
        sequence.blocks += blocks
        taken[sequence] = (tokens, blocks)

    def _generate(self, step: PlainStep, taken: dict[PlainSequence, tuple[int, int]]) -> None:
        for sequence, (tokens, _) in taken.items():
            step.tokens[sequence.name] = tokens
            sequence.computed += tokens
            if sequence.computed < sequence.prompt + sequence.outputs:
                continue
            sequence.outputs += bool(sequence.target)
            if sequence.outputs == sequence.target:
                step.finished.add(sequence.name)
                self.running.remove(sequence)
                self.free += sequence.blocks

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.settings.block_size)

    def _sort(self) -> None:
        if self.settings.scheduling_policy is SchedulingPolicy.PRIORITY:
            self.waiting.sort(key=lambda each: (each.priority, each.arrived_at, each.number))
