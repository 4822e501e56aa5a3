"""Names of spans and attributes: OpenTelemetry's conventions where they exist, otherwise `ewsjf.` names.

OpenTelemetry's Python package marks the conventions for generative AI as deprecated since they moved, so they
are defined here; a test compares them as long as the package has them. Of the values that clients or engines
choose, only names of models, tenants, requests, answers and conversations are recorded.
"""

from collections.abc import Mapping

# Generative AI.
CONVERSATION_ID = "gen_ai.conversation.id"
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_FINISH_REASONS = "gen_ai.response.finish_reasons"
RESPONSE_ID = "gen_ai.response.id"
RESPONSE_MODEL = "gen_ai.response.model"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
USAGE_CACHE_READ_INPUT_TOKENS = "gen_ai.usage.cache_read.input_tokens"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"
USAGE_REASONING_OUTPUT_TOKENS = "gen_ai.usage.reasoning.output_tokens"

# HTTP and errors.
ERROR_TYPE = "error.type"
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
HTTP_ROUTE = "http.route"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

# Of this project.
ATTEMPT = "ewsjf.attempt"
CLASS = "ewsjf.class"
ESTIMATED_TOKENS = "ewsjf.estimated_tokens"
LENGTH_QUEUE = "ewsjf.length_queue"
OUTCOME = "ewsjf.outcome"
POOL = "ewsjf.pool"
PUT_BACK = "ewsjf.put_back"
REPLICA = "ewsjf.replica"
REQUEST_ID = "ewsjf.request_id"
TENANT = "ewsjf.tenant"
# Seconds of a wait by cause, such as `ewsjf.wait.engines_busy`.
WAIT_PREFIX = "ewsjf.wait."

PROVIDER = "ewsjf"
SCOPE = "ewsjf.gateway"

# Child spans of the request, and its events.
QUEUE_SPAN = "ewsjf.queue"
PLACE_SPAN = "ewsjf.place"
FORWARD_SPAN = "ewsjf.forward"
QUEUED_EVENT = "ewsjf.queued"
DISPATCHED_EVENT = "ewsjf.dispatched"
PUT_BACK_EVENT = "ewsjf.put_back"
FIRST_CHUNK_EVENT = "ewsjf.first_chunk"

# Operation of each scheduled path; the conventions do not define the last ones.
OPERATIONS: Mapping[str, str] = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "chat",
    "/v1/messages": "chat",
    "/v1/completions": "text_completion",
    "/v1/embeddings": "embeddings",
    "/v2/embed": "embeddings",
    "/pooling": "pooling",
    "/classify": "classify",
    **dict.fromkeys(("/v1/score", "/score"), "score"),
    **dict.fromkeys(("/v1/rerank", "/v2/rerank", "/rerank"), "rerank"),
    "/v1/audio/transcriptions": "transcription",
    "/v1/audio/translations": "translation",
}
