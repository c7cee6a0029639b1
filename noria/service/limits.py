"""What a client may send, in one place; `docs/api.md` lists these."""

# Servers accept messages up to this size; each method then checks its own.
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
# A chat: all texts together, in UTF-8 bytes.
MAX_CHAT_BYTES = 4 * 1024 * 1024
MAX_MESSAGES = 4_096
MAX_BLOCKS_PER_MESSAGE = 64
# Blocks of all messages together.
MAX_BLOCKS = 16_384
MAX_TOOLS = 128
MAX_STOP_SEQUENCES = 16
MAX_STOP_SEQUENCE_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1_024
MAX_LOGPROBS = 20
MAX_CHOICES = 16
MAX_MODEL_NAME_BYTES = 256
MAX_REQUEST_ID_BYTES = 128
# Ids in one call of Decode.
MAX_DECODE_IDS = 1_048_576
# Outputs that one DecodeSession decodes at the same time.
MAX_DECODE_SLOTS = 65_536
# Absolute bounds of a priority; a key's ceiling may be lower.
MAX_PRIORITY = 100
MIN_PRIORITY = -100
DEFAULT_DEADLINE_S = 600.0
# A client that leaves its stream unread is aborted.
SLOW_READER_SECONDS = 30.0
SLOW_READER_BYTES = 1024 * 1024
# A session whose writer makes no progress is closed.
SESSION_STALL_SECONDS = 10.0
# A worker reports its load at least this often.
LOAD_INTERVAL_SECONDS = 0.5
# Header bytes a server accepts.
MAX_METADATA_BYTES = 16 * 1024
