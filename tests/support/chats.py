"""Varied conversations, the same at every run."""

import random

TEXTS = (
    "",
    " ",
    "Hello!",
    "토마토는 과일이야?",
    "짧게 답하세요.",
    "👩‍👩‍👧 family 👍🏽 🇰🇷",
    "e\u0301 café naïve Straße",
    "def f(x):\n    return x[1:-1] % 0x1F  # ok\n",
    '{"a": [1, 2.50, -3e10], "b": null}',
    "12345 67 8,901.23 ٣٤ ½ ²",
    "  two  spaces\t\ttabs\n\n\n lines \r\n end ",
    "a   9 b  42\n   7",
    "don't I'll we've it's THEY'RE",
    "<b>bold</b> & <|not_a_token|> {{ 7*7 }} {% raw %} a < b",
    "日本語と中文 ، العربية עברית ไทย",
    "x" * 300,
    "=" * 81 + "\n" + "#" * 80,
    "\u00a0nbsp\u3000ideographic\u200bzero\u2028line",
    "https://example.org/?q=1&r=a%20b#frag",
)


def some_text(rng: random.Random) -> str:
    return rng.choice(["", " ", "\n"]).join(rng.sample(TEXTS, rng.randint(1, 4)))


def some_chats(count: int, seed: int = 7) -> list[list[dict[str, str]]]:
    """Chats with and without system text, of one to four questions, a third of them to continue."""
    rng = random.Random(seed)
    chats = []
    for i in range(count):
        chat = [{"role": "system", "content": some_text(rng)}] if i % 2 else []
        for _ in range(rng.randint(0, 3)):
            chat.append({"role": "user", "content": some_text(rng)})
            chat.append({"role": "assistant", "content": some_text(rng)})
        chat.append({"role": "user", "content": some_text(rng)})
        if i % 3 == 0:
            chat.append({"role": "assistant", "content": some_text(rng)})
        chats.append(chat)
    return chats
