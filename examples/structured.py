"""Answers that a program reads: a JSON schema, and one of several strings."""

import json

from noria import Client

FRUIT = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "colour": {"enum": ["red", "green", "yellow"]},
        "grams": {"type": "integer", "minimum": 1, "maximum": 5000},
    },
    "required": ["name", "colour", "grams"],
    "additionalProperties": False,
}


def describe(client: Client, thing: str) -> dict[str, object] | None:
    asked = f"Describe a {thing} as JSON with name, colour and grams."
    answer = client.chat(asked, json_schema=FRUIT, max_tokens=200, temperature=0)
    if answer.stop_reason != "end_turn":
        return None  # max_tokens has cut it.
    fruit: dict[str, object] = json.loads(answer.text)
    return fruit


def is_fruit(client: Client, thing: str) -> bool:
    verdict = client.chat(f"Is a {thing} a fruit?", choice=["yes", "no"], max_tokens=10)
    return verdict.text == "yes"


def main() -> None:
    with Client("localhost:50051") as client:
        print(describe(client, "tomato"), is_fruit(client, "tomato"))


if __name__ == "__main__":
    main()
