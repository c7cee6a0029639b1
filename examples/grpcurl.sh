#!/bin/sh
# The same call with grpcurl: a stream of events, each as JSON. Ctrl-C cancels the request.
# The router shows its protos by reflection, so that no file is needed.

: "${NORIA_API_KEY:?the key that the first noria up wrote: see api-key in its config folder}"

exec grpcurl -plaintext \
    -max-time 60 \
    -H "authorization: Bearer $NORIA_API_KEY" \
    -d @ \
    "${1:-localhost:50051}" noria.v1.ChatService/StreamChat <<'JSON'
{
  "spec": {
    "system": "You work for a greengrocer. Answer in one sentence.",
    "messages": [
      {"role": "ROLE_USER", "content": [{"text": {"text": "Is a tomato a fruit?"}}]}
    ],
    "max_tokens": 200
  }
}
JSON
