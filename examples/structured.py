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


def main() -> None:
    with Client("localhost:50051") as client:
        asked = "Describe a tomato as JSON with name, colour and grams."
        answer = client.chat(asked, json_schema=FRUIT, max_tokens=200, temperature=0)
        if answer.stop_reason == "end_turn":  # Otherwise max_tokens has cut it.
            fruit = json.loads(answer.text)
            print(fruit["name"], fruit["colour"], fruit["grams"])
        verdict = client.chat("Is a tomato a fruit?", choice=["yes", "no"], max_tokens=10)
        print(verdict.text)


if __name__ == "__main__":
    main()
