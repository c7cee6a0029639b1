"""What the compiler says, without what it quotes.

Its messages repeat parts of the schema, which nobody but the caller may read; what is told
is one of the sentences here.
"""

import re

# The first that occurs in the compiler's message is what is told.
_KNOWN = (
    ("not present in a registry", 'a "$ref" to another document is never fetched'),
    ("PointerToNowhere", 'a "$ref" names nothing'),
    ("does not exist", 'a "$ref" names nothing'),
    ("oneOf constraints", '"oneOf" of alternatives that may overlap is not supported'),
    ("Unknown format", 'a "format" that is not supported'),
    ("maxProperties", '"minProperties" and "maxProperties" need all "properties" required'),
    ("Unsatisfiable", "nothing satisfies it"),
    ("NoExtension", "nothing that this model's vocabulary can write satisfies it"),
    ("recursion limit", "nested too deeply"),
    ("look-around", "look-around is not supported"),
    ("lookaround", "look-around is not supported"),
    ("backreference", "backreferences are not supported"),
    ("unclosed group", "not a regular expression: a group is not closed"),
    ("unopened group", "not a regular expression: a group is closed that was not opened"),
    ("unclosed character class", "not a regular expression: a character class is not closed"),
    ("missing expression", "not a regular expression: nothing stands before a repetition"),
    ("escape sequence", "not a regular expression: an escape sequence is unknown"),
    ("Unicode property", "not a regular expression: a Unicode property is unknown"),
    ("nested parentheses", "nested too deeply"),
    ("regex parse error", "not a regular expression"),
)
_COMPLEX = ("too many", "too large", "too complex", "fuel", "limit", "Current row has")
TOO_COMPLEX = "too complex"
_UNIMPLEMENTED = re.compile(r"Unimplemented keys: \[([^\]]*)\]")
# JSON Schema's own vocabulary; other names are the caller's.
_KEYWORDS = (
    *("not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems"),
    *("propertyNames", "dependentSchemas", "dependentRequired", "dependencies"),
    *("unevaluatedItems", "unevaluatedProperties", "additionalItems", "patternProperties"),
    *("contentEncoding", "contentMediaType", "contentSchema"),
    *("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"),
)


def told(message: str) -> str:
    """What may be said of a compiler's message."""
    if unimplemented := _UNIMPLEMENTED.search(message):
        names = [name for name in re.findall(r'"([^"]*)"', unimplemented[1]) if name in _KEYWORDS]
        known = ", ".join(f'"{name}"' for name in names)
        return f"not supported: {known}" if known else "a keyword that is not supported"
    # The compiler quotes the grammar after its own words.
    own = message.partition("\n   1 |")[0]
    for sign, problem in _KNOWN:
        if sign in own:
            return problem
    return TOO_COMPLEX if any(sign in own for sign in _COMPLEX) else "cannot be compiled"
