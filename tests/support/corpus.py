"""Lines of text in ten scripts and in none, made of common words by a seeded draw."""

import random
from collections.abc import Iterator

SCRIPTS = {
    "latin": "the house water morning Straße über façade niño coração żółty İstanbul naïve Œuvre "
    "don't can't I'm we've it's x-ray CamelCase snake_case ALLCAPS ﬁnal ångström đường tiếng",
    "cyrillic": "дом вода утро человек работа город объём ёлка Київ їжак здравствуйте мы это "
    "СССР пожалуйста къща љубав ѓавол",
    "greek": "σπίτι νερό πρωί άνθρωπος δουλειά πόλη Ελλάδα ώρα ΐδια καλημέρα ὅμως ᾳ ΑΒΓ",
    "arabic": "بيت ماء صباح إنسان عمل مدينة السلام عليكم كِتَابٌ لا پژوهش گفتگو ٣٤٥ والله الآن",
    "hebrew": "בית מים בוקר אדם עבודה עיר שלום עליכם שָׁלוֹם ירושלים כן לא תודה״",
    "devanagari": "घर पानी सुबह आदमी काम शहर नमस्ते क्या ज्ञान श्री हिन्दी १२३ विद्यार्थी ॐ है।",
    "thai": "บ้าน น้ำ เช้า คน งาน เมือง สวัสดี ครับ กรุงเทพมหานคร ภาษาไทย ๑๒๓ ไม่ เป็นไร",
    "han": "房子 水 早上 人 工作 城市 你好 中华人民共和国 圖書館 藝術 。 ， 龘 𠮷 一二三 谢谢",
    "kana": "いえ みず あさ ひと しごと まち こんにちは カタカナ ﾊﾝｶｸ "
    "がぎぐ ー っ です 、 東京タワー",
    "hangul": "집 물 아침 사람 일 도시 안녕하세요 대한민국 뷁 ㅋㅋㅋ 한국어 값이 없다 각",
}
_OTHERS = {
    "emoji": "🙂 🦊🌊 👩‍👩‍👧‍👦 🏴‍☠️ 🇰🇷 👍🏽 ✨ ❤️ 🤽🏾‍♀️ 🧿 ☃ 1️⃣",
    "code": "def f(x): return x+1; if(a&&b){c[i]++;} SELECT * FROM t WHERE id=42 <h1>x</h1> "
    "<table> </div> <!-- --> // /* */ -> => := != 0xFF \\n {{x}} ${y} a.b_c(d)",
    "digits": "0 7 42 1999 12345678 3.14159 1,000,000 -5 1e-9 50% №7 ½ ² Ⅳ 00:59 2024-02-29",
    "marks": "e\u0301 a\u0308\u0323 Z\u0351\u036b\u0343 n\u0303 \u0301 "
    "o\u200d\u200b x\ufe0f \u202eabc",
    "rare": "𒀀 𓀀 ᚠᛇ ᏣᎳᎩ አማርኛ தமிழ் ქართული հայերեն ລາວ ខ្មែរ བོད \U000f0000 \ufffd \u00ad \ufeff",
    "control": "<0x0A> <0xFF> <s> </s> <bos> <eos> <unk> <pad> <|im_start|> <|im_end|> "
    "<|endoftext|> <start_of_turn> <end_of_turn> <unused7> [INST] <think> <|user|>",
}
_JOINERS = (" ", " ", " ", "", "  ", "   ", "\n", "\t", "\n\n", ", ", ". ", " \n", "\r\n", "\u00a0")
_RUNS = (" ", "\n", "\t", "\u3000", "\r", "-", "=", "a", ".", "!")
_MAX_RUN = 31


def corpus_lines(count: int, seed: int = 1) -> list[str]:
    """So many different lines: each script alone, and mixtures; the same for the same seed.

    Runs of one letter are at most 31 long.
    """
    draw = random.Random(seed)
    lines: dict[str, None] = {}
    for make in _makers(draw):
        lines[make()] = None
        if len(lines) == count:
            break
    return list(lines)


def _makers(draw: random.Random):
    kinds = {**SCRIPTS, **_OTHERS}
    words = {name: text.split(" ") for name, text in kinds.items()}
    everything = [word for listed in words.values() for word in listed]
    while True:
        for listed in words.values():
            yield lambda listed=listed: _line(draw, listed)
        yield lambda: _line(draw, everything)
        yield lambda: _spaced(draw, everything)


def _line(draw: random.Random, words: list[str]) -> str:
    parts: Iterator[str] = (
        draw.choice(words) + draw.choice(_JOINERS) for _ in range(draw.randint(1, 12))
    )
    line = "".join(parts)
    return line if draw.random() < 0.3 else line.strip()


def _spaced(draw: random.Random, words: list[str]) -> str:
    """Words and runs of one letter, before digits above all."""
    parts = []
    for _ in range(draw.randint(1, 5)):
        parts.append(draw.choice(words))
        parts.append(draw.choice(_RUNS) * draw.randint(1, _MAX_RUN))
        parts.append(draw.choice(("", "7", "x", "é", "日")))
    # A run must not be lengthened by its neighbour.
    return "|".join(parts) if draw.random() < 0.2 else "·".join(parts)
