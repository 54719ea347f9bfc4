"""All names of OpenTelemetry's conventions in spans, in one place: those for GenAI are still in development.

Source: OpenTelemetry semantic conventions 1.44.0, GenAI semantic conventions 1.42.0.
"""

from typing import Final

SCOPE: Final = "roundhouse"
SCHEMA_URL: Final = "https://opentelemetry.io/schemas/1.44.0"

INVOKE_WORKFLOW: Final = "invoke_workflow"
INVOKE_AGENT: Final = "invoke_agent"
CHAT: Final = "chat"
TEXT_COMPLETION: Final = "text_completion"
EMBEDDINGS: Final = "embeddings"
EXECUTE_TOOL: Final = "execute_tool"

OPERATION: Final = "gen_ai.operation.name"
PROVIDER: Final = "gen_ai.provider.name"
WORKFLOW_NAME: Final = "gen_ai.workflow.name"
CONVERSATION_ID: Final = "gen_ai.conversation.id"
AGENT_ID: Final = "gen_ai.agent.id"
AGENT_NAME: Final = "gen_ai.agent.name"
REQUEST_MODEL: Final = "gen_ai.request.model"
FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
FIRST_CHUNK_S: Final = "gen_ai.response.time_to_first_chunk"
INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
CACHED_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
TOOL_NAME: Final = "gen_ai.tool.name"
TOOL_CALL_ID: Final = "gen_ai.tool.call.id"
SERVER_ADDRESS: Final = "server.address"
SERVER_PORT: Final = "server.port"
ERROR_TYPE: Final = "error.type"
HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
SERVICE_INSTANCE: Final = "service.instance.id"

# Our own names, where the conventions have none.
JOB_ID: Final = "roundhouse.job.id"
ROUND: Final = "roundhouse.round"
STATE: Final = "roundhouse.state"
WORKER: Final = "roundhouse.worker.id"
INCARNATION: Final = "roundhouse.worker.incarnation"
WAIT_S: Final = "roundhouse.queue_wait_s"

OPERATIONS: Final = {"/v1/completions": TEXT_COMPLETION, "/v1/embeddings": EMBEDDINGS}  # the others are chats
