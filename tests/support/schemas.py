"""Random JSON schemas, small ones: strings and arrays are bounded, so that outputs are short."""

from random import Random
from typing import Any

NAMES = ["name", "id", "tags", "size", "ok", "note", "parts", "kind", "at", "price", "größe", "a b"]
PATTERNS = [
    "^[A-Z]{2}[0-9]{3}$",
    "^(red|green|blue)$",
    "^[a-z]{1,8}(-[a-z]{1,4})?$",
    "^#[0-9a-f]{6}$",
]
WORDS = ["alpha", "beta", "two words", 'a "quote"', "ünï", "x\ny", "-"]
FORMATS = ["date", "uuid", "ipv4"]


def random_schema(seed: int) -> dict[str, Any]:
    """The schema of this seed: an object or an array, some with parts that others refer to."""
    random = Random(seed)
    schema = _object(random, 2) if random.random() < 0.85 else _array(random, 2)
    if random.random() < 0.25:
        part, refer = _part(random), {"$ref": "#/$defs/part"}
        schema["$defs"] = {"part": part}
        if schema["type"] == "object":
            schema["properties"]["part"] = refer
            schema["required"].append("part")
        else:
            schema["items"] = refer
    return schema


def _part(random: Random) -> dict[str, Any]:
    """In some schemas it refers to itself."""
    part = _object(random, 0)
    if random.random() < 0.15:
        part["properties"]["next"] = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/part"}]}
    return part


def _any(random: Random, depth: int) -> dict[str, Any]:
    kinds = [_scalar, _scalar, _scalar]
    if depth:
        kinds += [lambda r: _object(r, depth - 1), lambda r: _array(r, depth - 1)]
        kinds += [lambda r: {"anyOf": [_any(r, depth - 1), _scalar(r)]}]
    return random.choice(kinds)(random)


def _object(random: Random, depth: int) -> dict[str, Any]:
    names = random.sample(NAMES, random.randint(1, 4))
    required = [name for name in names if random.random() < 0.7]
    random.shuffle(required)
    return {
        "type": "object",
        "properties": {name: _any(random, depth) for name in names},
        "required": required,
        "additionalProperties": False,
    }


def _array(random: Random, depth: int) -> dict[str, Any]:
    least = random.randint(0, 2)
    bounds = {"minItems": least, "maxItems": least + random.randint(0, 2)}
    if random.random() < 0.2:
        prefix = [_scalar(random), _scalar(random)]
        return {"type": "array", "prefixItems": prefix, "items": False, "minItems": 2}
    return {"type": "array", "items": _any(random, depth), **bounds}


def _scalar(random: Random) -> dict[str, Any]:
    return random.choice(_SCALARS)(random)


def _integer(random: Random) -> dict[str, Any]:
    low = random.randint(-50, 50)
    schema: dict[str, Any] = {"type": "integer", "minimum": low, "maximum": low + 120}
    return schema | ({"multipleOf": random.choice([2, 5])} if random.random() < 0.2 else {})


def _number(random: Random) -> dict[str, Any]:
    """Where nothing but its range bounds a number, a model may write digits for ever."""
    schema: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": random.choice([1, 99.5])}
    return schema | ({"multipleOf": random.choice([0.5, 0.25])} if random.random() < 0.8 else {})


def _string(random: Random) -> dict[str, Any]:
    least = random.randint(0, 3)
    return {"type": "string", "minLength": least, "maxLength": least + random.randint(1, 20)}


_SCALARS = [
    _integer,
    _number,
    _string,
    _string,
    lambda random: {"type": "string", "pattern": random.choice(PATTERNS)},
    lambda random: {"type": "string", "format": random.choice(FORMATS)},
    lambda random: {"enum": random.sample([*WORDS, 1, -2.5, None, True], random.randint(1, 5))},
    lambda random: {"const": random.choice([*WORDS, 7, False])},
    lambda random: {"type": "boolean"},
    lambda random: {"type": random.choice(["null", "boolean", "integer"])},
    lambda random: {"type": ["string", "null"], "maxLength": 10},
]
