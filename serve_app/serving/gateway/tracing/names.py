"""The names of spans and of what they tell: OpenTelemetry's conventions where it has them, else our own.

The conventions for generative AI have left OpenTelemetry's Python package, which still has their names but
marks all of them as deprecated. So they stand here, and a test compares them while the package has them.
Nothing that a client or an engine has written is among them but names: of models, tenants and requests.
"""

from collections.abc import Mapping

# For generative AI.
OPERATION_NAME = "gen_ai.operation.name"
PROVIDER_NAME = "gen_ai.provider.name"
REQUEST_CHOICE_COUNT = "gen_ai.request.choice.count"
REQUEST_MAX_TOKENS = "gen_ai.request.max_tokens"
REQUEST_MODEL = "gen_ai.request.model"
REQUEST_STREAM = "gen_ai.request.stream"
RESPONSE_TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
USAGE_INPUT_TOKENS = "gen_ai.usage.input_tokens"
USAGE_OUTPUT_TOKENS = "gen_ai.usage.output_tokens"

# For HTTP and errors.
ERROR_TYPE = "error.type"
HTTP_REQUEST_METHOD = "http.request.method"
HTTP_RESPONSE_STATUS_CODE = "http.response.status_code"
HTTP_ROUTE = "http.route"
SERVER_ADDRESS = "server.address"
SERVER_PORT = "server.port"

# Ours.
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

PROVIDER = "ewsjf"
SCOPE = "ewsjf.gateway"

# Spans below that of the request, and an event.
QUEUE_SPAN = "ewsjf.queue"
PLACE_SPAN = "ewsjf.place"
FORWARD_SPAN = "ewsjf.forward"
FIRST_CHUNK_EVENT = "ewsjf.first_chunk"

# What each scheduled path does; the conventions have no word for the last ones.
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
