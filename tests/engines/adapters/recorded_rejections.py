"""Rejections of too long prompts by engine: status, body, and the limit that the body states.

Those of vLLM and llama.cpp were recorded from real servers. The others follow the engines' sources and
issues, with our own figures.
"""

from typing import Any

CONTEXT = 1024


def openai_error(message: str, **fields: Any) -> dict[str, Any]:
    return {
        "error": {"message": message, "type": "invalid_request_error", "param": None, "code": 400, **fields}
    }


def flat_error(message: str) -> dict[str, Any]:
    return {"object": "error", "message": message, "type": "BadRequestError", "param": None, "code": 400}


# Name: status, body, stated limit.
REJECTIONS: dict[str, tuple[int, dict[str, Any], int | None]] = {
    "vLLM": (
        400,
        openai_error(
            "This model's maximum context length is 1024 tokens. However, your prompt contains 3001 input "
            "tokens."
        ),
        CONTEXT,
    ),
    "vLLM, the renderer": (
        400,
        openai_error("Input length (3001) exceeds model's maximum context length (1024)."),
        CONTEXT,
    ),
    "vLLM, the decoder": (
        400,
        openai_error("The decoder prompt (length 3001) is longer than the maximum model length of 1024."),
        CONTEXT,
    ),
    "vLLM, max_tokens": (
        400,
        openai_error("max_tokens=3001 cannot be greater than max_model_len=1024."),
        CONTEXT,
    ),
    "SGLang": (
        400,
        flat_error("The input (3001 tokens) is longer than the model's context length (1024 tokens)."),
        CONTEXT,
    ),
    "SGLang, with max_tokens": (
        400,
        flat_error(
            "Requested token count exceeds the model's maximum context length of 1024 tokens. You requested "
            "a total of 3101 tokens: 3001 tokens from the input messages and 100 tokens for the completion."
        ),
        CONTEXT,
    ),
    "llama.cpp": (
        400,
        {
            "error": {
                "code": 400,
                "message": "request (3001 tokens) exceeds the available context size (1024 tokens), try "
                "increasing it",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 3001,
                "n_ctx": 1024,
            }
        },
        CONTEXT,
    ),
    "llama.cpp of September 2025": (
        400,
        {
            "error": {
                "code": 400,
                "message": "the request exceeds the available context size. try increasing the context size "
                "or enable context shift",
                "type": "exceed_context_size_error",
                "n_prompt_tokens": 3001,
                "n_ctx": 1024,
            }
        },
        CONTEXT,
    ),
    "llama-cpp-python": (
        400,
        openai_error(
            "This model's maximum context length is 1024 tokens, however you requested 3001 tokens",
            code="context_length_exceeded",
        ),
        CONTEXT,
    ),
    "TGI": (
        422,
        {
            "error": "Input validation error: `inputs` must have less than 1024 tokens. Given: 3001",
            "error_type": "validation",
        },
        CONTEXT,
    ),
    "TGI, with max_new_tokens": (
        422,
        {
            "error": "Input validation error: `inputs` tokens + `max_new_tokens` must be <= 1024. Given: 924 "
            "`inputs` tokens and 200 `max_new_tokens`",
            "error_type": "validation",
        },
        CONTEXT,
    ),
    "TensorRT-LLM": (
        400,
        flat_error(
            "The sum of prompt length (3001.0), query length (0) should not exceed max_num_tokens (1024)"
        ),
        CONTEXT,
    ),
    "TensorRT-LLM, without max_tokens": (
        400,
        flat_error(
            "`default_max_tokens` (-1977) should be greater than 0, `default_max_tokens` (-1977) = "
            "max_seq_len (1024) - `splited_prompt_len` (3001) - `query_token_len` (0)"
        ),
        CONTEXT,
    ),
    "Triton with TensorRT-LLM": (
        400,
        openai_error("Prompt length (3001) exceeds maximum input length (1024). Set log level to info."),
        CONTEXT,
    ),
    "Ollama": (400, openai_error("the input length exceeds the context length"), None),
    "a server with OpenAI's code alone": (400, openai_error("no", code="context_length_exceeded"), None),
}
