"""The version of the wire between Noria's services; neighbours one apart interoperate."""

PROTOCOL_VERSION = 1
