"""What a client may send, in one place; `docs/api.md` lists these with their comments."""

# What a client may send. Beyond it a request is refused with `INVALID_ARGUMENT`, unless said
# otherwise.

# Size of a message that a server reads at all; beyond it gRPC answers `RESOURCE_EXHAUSTED`.
# Each method then checks its own.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# Size of a call's metadata; beyond it gRPC answers `RESOURCE_EXHAUSTED`.
MAX_METADATA_BYTES = 16 * 1024
# Size of a request of the ChatService as it arrives, and of its spec; texts in UTF-8.
MAX_CHAT_BYTES = 4 * 1024 * 1024
# Messages of a conversation.
MAX_MESSAGES = 4_096
# Content blocks of one message.
MAX_BLOCKS_PER_MESSAGE = 64
# Content blocks of all messages together.
MAX_BLOCKS = 16_384
# Tools of a request.
MAX_TOOLS = 128
# Ids of a raw prompt.
MAX_PROMPT_IDS = 1_048_576
# Stop strings of a request.
MAX_STOP_SEQUENCES = 16
# Size of one stop string in UTF-8; at least 1.
MAX_STOP_SEQUENCE_BYTES = 256
# Size of all stop strings together in UTF-8.
MAX_STOP_SEQUENCES_BYTES = 1_024
# Stop ids of a request.
MAX_STOP_TOKEN_IDS = 64
# Entries of `logit_bias`.
MAX_LOGIT_BIAS = 1_024
# Alternatives reported for each token.
MAX_LOGPROBS = 20
# Tokens told of with `prompt_logprobs`: for each of the prompt itself and its alternatives.
MAX_PROMPT_LOGPROBS = 32_768
# Size of a JSON schema for the output, in UTF-8.
MAX_JSON_SCHEMA_BYTES = 64 * 1024
# Objects and arrays inside each other in such a schema.
MAX_JSON_SCHEMA_DEPTH = 64
# Size of a regular expression for the output, in UTF-8.
MAX_REGEX_BYTES = 16 * 1024
# Strings of which the output must be one.
MAX_GRAMMAR_CHOICES = 1_024
# Size of all these strings together in UTF-8.
MAX_GRAMMAR_CHOICES_BYTES = 64 * 1024
# Choices of a request, `n`.
MAX_CHOICES = 16
# Size of a model's name in UTF-8.
MAX_MODEL_NAME_BYTES = 256
# Size of a request id in UTF-8.
MAX_REQUEST_ID_BYTES = 128
# Size of a key's label in UTF-8.
MAX_KEY_LABEL_BYTES = 64
# Size of a subject alternative name of client certificates, in UTF-8.
MAX_CERTIFICATE_NAME_BYTES = 256
# Names in a tenant's list of models.
MAX_SCOPE_NAMES = 256
# The highest priority; a key's ceiling may be lower.
MAX_PRIORITY = 100
# The lowest priority.
MIN_PRIORITY = -100

# Days of one usage report.
MAX_USAGE_DAYS = 400
# Lines of one usage report.
MAX_USAGE_LINES = 50_000

# How long a client may take.

# Deadline of a call that comes without one.
DEFAULT_DEADLINE_S = 600.0
# A stream on which something has waited unread for this long ends with `SLOW_READER`.
SLOW_READER_SECONDS = 30.0
# A stream on which this much waits unread ends with `SLOW_READER`.
SLOW_READER_BYTES = 1024 * 1024
# What `prompt_logprobs` asked for comes at once however fast it is read: it counts there once a
# message has been left unread for this long.
SLOW_PROMPT_READER_SECONDS = 1.0

# Between the services; clients never meet these.

# Ids in one call of `Decode`.
MAX_DECODE_IDS = 1_048_576
# Outputs that one `DecodeSession` decodes at the same time.
MAX_DECODE_SLOTS = 65_536
# Size of the salt of a request's cached prefixes.
MAX_CACHE_SALT_BYTES = 64
# A session whose writer makes no progress for this long is closed.
SESSION_STALL_SECONDS = 10.0
# A worker reports its load at least this often.
LOAD_INTERVAL_SECONDS = 0.5
