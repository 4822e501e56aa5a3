"""Scripted model: thinks, then answers or calls a tool, without any training.

Random weights never end an answer, nor write a tool call that a parser would find, so these parts are
scripted. Each token belongs to one step of the script, and the last token alone decides the next step.
Attention over the whole context, with random weights, chooses among the step's words. So answers differ with
the context, as a trained model's do, and are equal for equal contexts.

The hidden state has three parts: a number for each step, the token's values for attention, and the result of
attention. The output layer reads the first and the last.
"""

import importlib
import itertools
import random
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CITIES = ("Paris", "London", "Rome", "China", "Japan", "Boston")
TOOL_NAME = "look_up"
# The script's tool calls satisfy this schema.
TOOL_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": list(CITIES)}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
_THOUGHTS, _WORDS, _CHOICES = 12, 4, 6
# A call before its city, between city and days, and after the days; in pieces, so that it is streamed.
_CALL = (
    ("<tool_call>", '{"name": "', TOOL_NAME, '", "arguments": ', '{"city": "'),
    ('",', ' "days": '),
    ("}}", "</tool_call>"),
)
# Parts of the hidden state: steps, tokens, findings.
_STEPS, _TOKENS, _FOUND = 96, 80, 80
_HIDDEN, _HEADS = 256, 4
_CONTEXT = 8192
# Weight of the step relative to the choice among its words, and sharpness of attention.
_STEP_WEIGHT, _SHARPNESS = 100.0, 12.0
_STEP_VALUE, _FAVOUR_OF_CALLS = 4.0, 1.0
_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + (message['content'] or '') }}
{%- for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>' }}{% endif %}
"""


@dataclass(frozen=True)
class _ScriptStep:
    """Alternative tokens of one step.

    Attributes:
        favour: added to the first token, which makes it more frequent.
        shortcut: replaces the next step's token where a grammar allows only this one.
    """

    tokens: Sequence[int]
    favour: float = 0.0
    shortcut: int | None = None


def make_scripted(folder: Path, tokenizer_of: Path) -> Path:
    """Write the model into this folder with another model's tokenizer; return the folder."""
    torch, transformers = (importlib.import_module(name) for name in ("torch", "transformers"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(tokenizer_of)
    tokenizer.add_tokens(["<think>", "</think>", *(_written(piece) for part in _CALL for piece in part)])
    tokenizer.chat_template = _TEMPLATE
    tokenizer.model_max_length = _CONTEXT
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=_HIDDEN,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=_HEADS,
        num_key_value_heads=_HEADS,
        max_position_embeddings=_CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        _write(model, _script(tokenizer), torch)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _script(tokenizer: Any) -> list[_ScriptStep]:
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    end = tokenizer.eos_token_id
    start_of_thoughts, end_of_thoughts = (vocabulary[word] for word in ("<think>", "</think>"))
    cities = [vocabulary[city] for city in CITIES]
    days = [vocabulary[digit] for digit in string.digits[1:]]
    call, between, last = ([vocabulary[_written(piece)] for piece in part] for part in _CALL)
    words = _words(vocabulary)

    def word_steps(count: int) -> Iterator[_ScriptStep]:
        return (_ScriptStep([next(words) for _ in range(_CHOICES)]) for _ in range(count))

    return [
        _ScriptStep([start_of_thoughts]),
        *word_steps(_THOUGHTS),
        _ScriptStep([end_of_thoughts], shortcut=call[0]),
        *word_steps(_WORDS),
        _ScriptStep([call[0], end], favour=_FAVOUR_OF_CALLS),
        *(_ScriptStep([token]) for token in call[1:]),
        _ScriptStep(cities),
        *(_ScriptStep([token]) for token in between),
        _ScriptStep(days),
        *(_ScriptStep([token]) for token in last),
        _ScriptStep([end]),
    ]


def _written(piece: str) -> str:
    """Return a piece as a byte-level vocabulary writes it."""
    return piece.replace(" ", "Ġ")


def _words(vocabulary: dict[str, int]) -> Iterator[int]:
    words = sorted(
        token
        for word, token in vocabulary.items()
        if word[:1] == "Ġ" and word[1:].isascii() and word[1:].islower() and len(word) > 3
    )
    random.Random(0).shuffle(words)
    return iter(words)


def _write(model: Any, script: Sequence[_ScriptStep], torch: Any) -> None:
    """Set the weights for the script."""
    random_numbers = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(*shape, generator=random_numbers)

    embedding, head = model.model.embed_tokens.weight, model.lm_head.weight
    tokens, found = slice(_STEPS, _STEPS + _TOKENS), slice(_STEPS + _TOKENS, _HIDDEN)
    embedding.zero_()
    head.zero_()
    embedding[:, tokens] = normal(len(embedding), _TOKENS) / _TOKENS**0.5
    for step, (now, then) in enumerate(itertools.pairwise(script)):
        embedding[list(now.tokens), step] = _STEP_VALUE
        for token in then.tokens:
            head[token, step] = _STEP_WEIGHT
            head[token, found] = normal(_FOUND)
        head[then.tokens[0], step] += then.favour
        if now.shortcut is not None:
            head[now.shortcut, step] = _STEP_WEIGHT / 2
    layer = model.model.layers[0]
    for projection, scale in (("q_proj", _SHARPNESS), ("k_proj", 1.0), ("v_proj", 1.0)):
        weight = getattr(layer.self_attn, projection).weight
        weight.copy_(normal(*weight.shape) * scale / _HIDDEN**0.5)
    out = layer.self_attn.o_proj.weight
    out.zero_()
    out[found] = normal(_FOUND, _HIDDEN) / _HIDDEN**0.5
    layer.mlp.down_proj.weight.zero_()
